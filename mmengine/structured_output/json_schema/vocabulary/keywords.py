"""The keywords of draft 2020-12: what each one's value must be, and what becomes of it here."""

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TypeGuard

from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

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
STANDARD_FORMATS = frozenset(  # those of the specification, of which formats.py has the enforced ones
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

MAX_ENUM = 20_000  # values of one enum
MAX_COUNT = 100_000  # any minItems, maxLength, …
EXACT = 2**53  # beyond it the grammar engine's numbers are not exact
MAX_DECIMALS = 15


def fraction(value: int | float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def to_number(value: Fraction) -> int | float:
    """Return an int where the value is whole, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)


def decimals(value: Fraction) -> int:
    """How many digits behind the point it takes to write `value` (which has finitely many)."""
    count = 0
    while value.denominator != 1:
        value *= 10
        count += 1
    return count


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def same(value: object) -> object:
    """A hashable key that is equal for values that JSON Schema calls equal: 1 and 1.0, but not 1 and true."""
    if isinstance(value, bool) or value is None:
        return ("is", value)
    if isinstance(value, int | float):
        return ("number", fraction(value))
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ("array", tuple(same(item) for item in value))
    assert isinstance(value, dict)  # nothing else is JSON
    return ("object", frozenset((key, same(item)) for key, item in value.items()))


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def check_values(schema: dict, pointer: str) -> None:
    """Refuses a schema object whose keywords have values that are no valid ones."""
    for keyword, value in schema.items():
        check = _CHECK_OF.get(keyword)
        if check is not None and (not check[0](value) or keyword == "multipleOf" and value <= 0):
            wanted = check[1] if not check[0](value) else "more than 0"
            refuse(keyword, step(pointer, keyword), f"it must be {wanted}, not {shown(value)}")
        if (
            keyword in COUNTS
            and value > MAX_COUNT
            and keyword not in ("maxLength", "maxItems", "maxProperties")
        ):
            refuse(
                keyword, step(pointer, keyword), f"it is more than {MAX_COUNT:,}, the most that is enforced"
            )
        if keyword in NUMBERS:
            _check_decimals(value, keyword, step(pointer, keyword))
    if len(schema.get("enum", ())) > MAX_ENUM:
        refuse("enum", step(pointer, "enum"), f"it has more than {MAX_ENUM:,} values")


def contradiction(schema: dict) -> tuple[tuple[str | int, ...], str] | None:
    """Why nothing satisfies a schema object, where two of its keywords say so: what the reason is, and the
    names that lead to it."""
    if schema.get("enum") == []:
        return ("enum",), "an enum of nothing allows nothing"
    for low, high in (
        *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
        *(("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")),
        ("exclusiveMinimum", "exclusiveMaximum"),
    ):
        if low in schema and high in schema:
            a, b = fraction(schema[low]), fraction(schema[high])
            if a > b or a == b and "exclusive" in low + high:
                return (low,), f"{shown(schema[low])} leaves nothing below {high} {schema[high]}"
    properties = schema.get("properties", {})
    for at, name in enumerate(schema.get("required", [])):
        if properties.get(name) is False:
            return ("required", at), f"{shown(name)} is required and its schema is false"
    return None


def check_value(value: int | float, keyword: str, pointer: str) -> None:
    """Refuses a value that the grammar engine would write otherwise: it reads a float, and writes the fewest
    digits that tell it from others."""
    if abs(value) > EXACT and fraction(float(value)) != value:
        refuse(keyword, pointer, f"{value} is beyond 2**53, where numbers are not exact")
    _check_decimals(value, keyword, pointer)


def _check_decimals(value: int | float, keyword: str, pointer: str) -> None:
    if isinstance(value, float) and decimals(fraction(value)) > MAX_DECIMALS:
        refuse(keyword, pointer, f"{value} has more than {MAX_DECIMALS} digits behind the point")


def check_multiple(value: int | float, pointer: str) -> None:
    """Refuses steps that the grammar engine would not take exactly.

    It reads them as a float and multiplies by 10 until nothing is behind the point.
    """
    coefficient, digits = float(value), 0
    while coefficient != int(coefficient):
        coefficient *= 10
        digits += 1
    if int(coefficient) >= 2**32 or fraction(value) != fraction(int(coefficient)) / 10**digits:
        refuse("multipleOf", pointer, f"steps of {value} cannot be enforced exactly")


# Subschemas are looked at when they are reached.
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
