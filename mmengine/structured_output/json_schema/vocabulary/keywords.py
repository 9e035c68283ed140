"""Lists the keywords in draft 2020-12, and checks their values. Also converts and compares JSON values."""

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TypeGuard

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse
from mmengine.structured_output.json_schema.work import comparisons_of, spend_work

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "$schema",
        "$id",
        "$anchor",
        "$dynamicAnchor",
        "$defs",
        "definitions",
        "discriminator",
    ]
)
TYPES = ("null", "boolean", "number", "string", "array", "object")
TYPE_NAMES = frozenset((*TYPES, "integer"))

SUBSCHEMA = frozenset(
    [
        "additionalProperties",
        "items",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    ]
)
SUBSCHEMA_LIST = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
SUBSCHEMA_MAP = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
COUNTS = frozenset(
    [
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "minContains",
        "maxContains",
    ]
)
STRINGS = frozenset(
    [
        "$ref",
        "$anchor",
        "$dynamicAnchor",
        "$dynamicRef",
        "$id",
        "pattern",
        "format",
    ]
)
ASSERTIONS = (
    frozenset(["type", "enum", "const", "required", "dependentRequired", "uniqueItems"])
    | SUBSCHEMA
    | SUBSCHEMA_LIST
    | SUBSCHEMA_MAP
    | NUMBERS
    | COUNTS
    | STRINGS
)
KNOWN = ANNOTATIONS | ASSERTIONS
# The specification's formats. formats.py has patterns for the formats that are enforced.
STANDARD_FORMATS = frozenset(
    (
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
    )
    + ("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "regex")
    + ("relative-json-pointer",)
)

MAX_ENUM = 20_000  # Maximum number of values in an enum.
MAX_COUNT = 100_000  # Maximum value of minItems, minLength and similar keywords.
EXACT = 2**53  # Integers up to this value are exact in the grammar engine, which reads floats.
MAX_DECIMALS = 15
# Maximum number of remainders for a `multipleOf`. The grammar engine has a state for each remainder.
MAX_REMAINDERS = 250_000
REMAINDER_COST = 5  # Work steps per remainder. The grammar engine needs about 10 µs per remainder.


def to_fraction(value: int | float) -> Fraction:
    """Return the exact value of a number's decimal text: 0.1 becomes 1/10."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def to_number(value: Fraction) -> int | float:
    """Return an int if the value is whole, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)


def count_decimals(value: Fraction) -> int:
    """Return the number of decimal places. The decimal expansion of `value` must be finite."""
    count = 0
    while value.denominator != 1:
        value *= 10
        count += 1
    return count


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def equality_key(value: object) -> object:
    """Return a hashable key. Values that are equal in JSON Schema have equal keys.

    1 and 1.0 are equal, but 1 and true are not.
    """
    if isinstance(value, bool) or value is None:
        return ("is", value)
    if isinstance(value, int | float):
        return ("number", to_fraction(value))
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ("array", tuple(equality_key(item) for item in value))
    assert isinstance(value, dict)  # JSON has no further types.
    return ("object", frozenset((key, equality_key(item)) for key, item in value.items()))


def show_value(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def check_values(schema: dict, pointer: str) -> None:
    """Refuse a schema object if a keyword's value is invalid."""
    for keyword, value in schema.items():
        check = _CHECK_OF.get(keyword)
        if check is not None and (not check[0](value) or keyword == "multipleOf" and value <= 0):
            wanted = check[1] if not check[0](value) else "more than 0"
            refuse(keyword, join_pointer(pointer, keyword), f"must be {wanted}, not {show_value(value)}")
        if (
            keyword in COUNTS
            and value > MAX_COUNT
            and keyword not in ("maxLength", "maxItems", "maxProperties")
        ):
            refuse(
                keyword,
                join_pointer(pointer, keyword),
                f"exceeds {MAX_COUNT:,}, the largest count that is enforced",
            )
        if keyword in NUMBERS:
            _check_decimals(value, keyword, join_pointer(pointer, keyword))
    if len(schema.get("enum", ())) > MAX_ENUM:
        refuse("enum", join_pointer(pointer, "enum"), f"has more than {MAX_ENUM:,} values")


def find_contradiction(schema: dict) -> tuple[tuple[str | int, ...], str] | None:
    """Return (path to a keyword, reason) if two keywords contradict each other, else None."""
    if schema.get("enum") == []:
        return ("enum",), "an empty enum allows nothing"
    for low, high in (
        *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
        *(("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")),
        ("exclusiveMinimum", "exclusiveMaximum"),
    ):
        if low in schema and high in schema:
            a, b = to_fraction(schema[low]), to_fraction(schema[high])
            if a > b or a == b and "exclusive" in low + high:
                return (low,), f"{show_value(schema[low])} contradicts {high} {schema[high]}"
    properties = schema.get("properties", {})
    for at, name in enumerate(schema.get("required", [])):
        if properties.get(name) is False:
            return ("required", at), f"{show_value(name)} is required, but its schema is false"
    return None


def check_value(value: int | float, keyword: str, pointer: str) -> None:
    """Refuse a number that the grammar engine would change.

    The engine reads a float and writes the shortest decimal text for the float.
    """
    if abs(value) > EXACT and to_fraction(float(value)) != value:
        refuse(keyword, pointer, f"{value} is beyond 2**53, where numbers are not exact")
    _check_decimals(value, keyword, pointer)


def _check_decimals(value: int | float, keyword: str, pointer: str) -> None:
    if isinstance(value, float) and count_decimals(to_fraction(value)) > MAX_DECIMALS:
        refuse(keyword, pointer, f"{value} has more than {MAX_DECIMALS} decimal places")


def check_multiple(value: int | float, pointer: str) -> None:
    """Refuse a `multipleOf` that the grammar engine would not enforce exactly.

    The engine reads a float and multiplies it by 10 until the value is whole.
    """
    coefficient, digits = float(value), 0
    while coefficient != int(coefficient):
        coefficient *= 10
        digits += 1
    if int(coefficient) >= 2**32 or to_fraction(value) != to_fraction(int(coefficient)) / 10**digits:
        refuse("multipleOf", pointer, f"steps of {value} cannot be enforced exactly")
    # For a `multipleOf` such as 5 or 20, only a number's last digits matter.
    if len(str(int(coefficient)).rstrip("0")) == 1:
        return
    if coefficient > MAX_REMAINDERS:
        text = f"steps of {value} have more than {MAX_REMAINDERS:,} remainders, the most that is enforced"
        refuse("multipleOf", pointer, text)
    with comparisons_of("multipleOf", pointer):
        spend_work(REMAINDER_COST * int(coefficient))


# Tuples (keywords, check of their values, description of valid values).
_CHECKS: list[tuple[frozenset[str], Callable[[object], bool], str]] = [
    (SUBSCHEMA, lambda v: isinstance(v, dict | bool), "a schema (an object, true or false)"),
    (SUBSCHEMA_LIST, lambda v: isinstance(v, list) and len(v) > 0, "a list of at least one schema"),
    (SUBSCHEMA_MAP, lambda v: isinstance(v, dict), "an object of schemas"),
    (NUMBERS, is_number, "a number"),
    (COUNTS, is_count, "a whole number, 0 or more"),
    (STRINGS, lambda v: isinstance(v, str), "a string"),
    (frozenset(["enum"]), lambda v: isinstance(v, list), "a list of values"),
    (frozenset(["uniqueItems"]), lambda v: isinstance(v, bool), "true or false"),
    (frozenset(["required"]), lambda v: _names(v), "a list of different names"),
    (frozenset(["dependentRequired"]), lambda v: _lists_of_names(v), "an object of lists of names"),
    (frozenset(["type"]), lambda v: _types(v), f"one of {', '.join((*TYPES, 'integer'))}, or a list of them"),
]
_CHECK_OF = {keyword: (is_good, wanted) for keywords, is_good, wanted in _CHECKS for keyword in keywords}


def _lists_of_names(value: object) -> bool:
    return isinstance(value, dict) and all(_names(names) for names in value.values())


def _names(value: object) -> bool:
    return (
        isinstance(value, list) and all(isinstance(v, str) for v in value) and len(set(value)) == len(value)
    )


def _types(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return len(names) > 0 and all(isinstance(name, str) and name in TYPE_NAMES for name in names)
