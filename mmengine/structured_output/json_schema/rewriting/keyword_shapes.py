"""Computes the shape for a schema object's keywords. Keywords that combine schemas, such as anyOf, are
handled elsewhere.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from collections.abc import Callable

from msgspec.structs import replace

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.json_types import (
    UNCONSTRAINED,
    Array,
    Blocked,
    Boolean,
    Conjunction,
    Constraint,
    Contains,
    Limit,
    Null,
    Number,
    Object,
    Shape,
    String,
    conjoin,
    intersect_shapes,
    settle_number,
    tighter_maximum,
)
from mmengine.structured_output.json_schema.patterns.character_sets import (
    PatternError,
    UnenforceablePattern,
)
from mmengine.structured_output.json_schema.patterns.pattern import Pattern, parse_pattern
from mmengine.structured_output.json_schema.reading.document import Document
from mmengine.structured_output.json_schema.vocabulary.formats import EXACT, FORMATS
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    NUMBERS,
    check_multiple,
    check_value,
    equality_key,
    is_number,
    show_value,
    to_fraction,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import (
    UnenforceablePart,
    format_pointer,
    refuse,
)

KeywordShape = tuple[Shape, list[Conjunction] | None]
_ANY_NUMBER, _ANY_INTEGER = Number(), Number(integer=True)
SCALARS: dict[str, Shape] = {  # Shapes of schemas that consist of a type alone.
    **{kind: {kind: UNCONSTRAINED[kind]} for kind in ("null", "boolean", "string")},
    "number": {"number": _ANY_NUMBER},
    "integer": {"number": _ANY_INTEGER},
}


def keyword_shape(document: Document, place: int) -> KeywordShape:
    """Return (shape, alternatives or None). An enum with several values has alternatives if some value is an
    array or an object.
    """
    schema = document.nodes[place].schema
    assert isinstance(schema, dict)
    kinds = _kinds(schema)
    shape: Shape = {}
    for kind in UNCONSTRAINED:
        if kind in kinds:
            constraint = _CONSTRAINTS[kind](document, place, schema)
            if constraint is not None:
                shape[kind] = constraint
    number = shape.get("number")
    if kinds.get("number") and isinstance(number, Number):
        whole = _ANY_INTEGER if number is _ANY_NUMBER else settle_number(_integer(number))
        if whole is None:
            del shape["number"]
        else:
            shape["number"] = whole
    choice = None
    for keyword in ("const", "enum"):
        if keyword in schema:
            values = [schema[keyword]] if keyword == "const" else schema[keyword]
            allowed, choice = _values(document, place, keyword, values)
            if choice is None:
                shape = intersect_shapes(shape, allowed)
    return shape, choice


def _kinds(schema: dict) -> dict[str, bool]:
    """Return the allowed types as keys. The value for "number" is True if only integers are allowed."""
    types = schema.get("type", list(UNCONSTRAINED))
    names = [types] if isinstance(types, str) else types
    kinds = {name: False for name in names if name != "integer"}
    if "integer" in names and "number" not in names:
        kinds["number"] = True
    return kinds


def _integer(constraint: Number) -> Number:
    return replace(constraint, integer=True)


def _values(
    document: Document, place: int, keyword: str, values: list
) -> tuple[Shape, list[Conjunction] | None]:
    """Return (shape, None). For an enum with several values, returns (UNCONSTRAINED, alternatives) if some
    value is an array or an object.
    """
    pointer = join_pointer(document.nodes[place].pointer, keyword)
    unique = list({equality_key(value): value for value in values}.values())
    if not unique:
        return {}, None
    scalars = [value for value in unique if not isinstance(value, list | dict)]
    nested = [value for value in unique if isinstance(value, list | dict)]
    for value in scalars:
        if is_number(value):
            check_value(value, keyword, pointer)
    shape: Shape = {}
    if None in scalars:
        shape["null"] = Null()
    booleans = frozenset(value for value in scalars if isinstance(value, bool))
    if booleans:
        shape["boolean"] = Boolean(booleans)
    numbers = tuple(to_fraction(value) for value in scalars if is_number(value))
    if numbers:
        shape["number"] = Number(values=numbers)
    strings = tuple(value for value in scalars if isinstance(value, str))
    if strings:
        shape["string"] = String(values=strings)
    if isinstance(unique[0], list) and len(unique) == 1:
        return {"array": _constant_array(document, place, keyword, unique[0])}, None
    if isinstance(unique[0], dict) and len(unique) == 1:
        return {"object": _constant_object(document, place, keyword, unique[0])}, None
    if not nested:
        return shape, None
    base = document.nodes[place].pointer
    made = [document.make({"const": v}, base, (place, keyword, equality_key(v))) for v in nested]
    if scalars:
        made.insert(0, document.make({"enum": scalars}, base, (place, keyword, "scalars")))
    return UNCONSTRAINED, [(one,) for one in made]


def _constant_array(document: Document, place: int, keyword: str, value: list) -> Array:
    base = document.nodes[place].pointer
    items = tuple(
        (document.make({"const": v}, base, (place, keyword, "item", equality_key(v))),) for v in value
    )
    return Array(len(items), len(items), items, ())


def _constant_object(document: Document, place: int, keyword: str, value: dict) -> Object:
    base = document.nodes[place].pointer
    items: dict[str, Conjunction] = {
        name: (document.make({"const": v}, base, (place, keyword, "item", equality_key(v))),)
        for name, v in value.items()
    }
    return Object(items, tuple(items), {}, (document.make(False, base, "nothing"),))


def _number(document: Document, place: int, schema: dict) -> Number | None:
    def limit(inclusive: str, exclusive: str, stricter: int) -> Limit | None:
        found = [
            (to_fraction(schema[name]), name == exclusive)
            for name in (inclusive, exclusive)
            if name in schema
        ]
        return max(found, key=lambda one: (one[0] * stricter, one[1])) if found else None

    if NUMBERS.isdisjoint(schema):
        return _ANY_NUMBER
    multiple = schema.get("multipleOf")
    if multiple is not None:
        check_multiple(multiple, join_pointer(document.nodes[place].pointer, "multipleOf"))
    return settle_number(
        Number(
            False,
            limit("minimum", "exclusiveMinimum", 1),
            limit("maximum", "exclusiveMaximum", -1),
            None if multiple is None else to_fraction(multiple),
        )
    )


def _string(document: Document, place: int, schema: dict) -> String | None:
    pointer = document.nodes[place].pointer
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    patterns: list[Pattern] = []
    blocked: Blocked = ()
    if "pattern" in schema:
        patterns.append(_pattern(document, schema["pattern"], "pattern", join_pointer(pointer, "pattern")))
    if "format" in schema:
        name = schema["format"]
        if name in FORMATS:
            found = parse_pattern(f"^(?:{FORMATS[name]})$")
            patterns.append(found._replace(budget=document.budget, exact=name in EXACT))
        else:
            why = f"{show_value(name)} cannot be enforced (supported: {', '.join(sorted(FORMATS))})"
            blocked = (("format", join_pointer(pointer, "format"), why),)
    if high is not None and low > high:
        return None
    return String(low, None if high is None else int(high), tuple(patterns), None, blocked)


def _pattern(document: Document, text: str, keyword: str, pointer: str) -> Pattern:
    try:
        return parse_pattern(text)._replace(budget=document.budget)
    except UnenforceablePattern as error:
        raise UnenforceablePart(keyword, format_pointer(pointer), str(error)) from None
    except PatternError as error:
        refuse(keyword, pointer, str(error))


def key_pattern(document: Document, place: int, text: str) -> Pattern:
    """Return a key pattern from a place's patternProperties. Refuses an unsupported pattern."""
    pointer = join_pointer(document.nodes[place].pointer, "patternProperties", text)
    return _pattern(document, text, "patternProperties", pointer)


def _array(document: Document, place: int, schema: dict) -> Array | None:
    pointer = document.nodes[place].pointer
    low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
    prefix = tuple(
        document.part(place, "prefixItems", at) for at in range(len(schema.get("prefixItems", ())))
    )
    rest: Conjunction = document.part(place, "items") if "items" in schema else ()
    blocked: Blocked = ()
    contains: tuple[Contains, ...] = ()
    if "contains" in schema:
        fewest, most = int(schema.get("minContains", 1)), schema.get("maxContains")
        if schema["contains"] in (True, {}):
            low, high = max(low, fewest), tighter_maximum(high, most)
        elif fewest or most is not None:
            most = None if most is None else int(most)
            contains = (
                Contains(
                    document.subschema(place, "contains"), fewest, most, join_pointer(pointer, "contains")
                ),
            )
    unique = join_pointer(pointer, "uniqueItems") if schema.get("uniqueItems") else None
    if high is not None and low > high:
        return None
    high = None if high is None else int(high)
    return Array(low, high, prefix, rest, blocked, contains, unique)


def _object(document: Document, place: int, schema: dict) -> Object | None:
    pointer = document.nodes[place].pointer
    low, high = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    patterns: dict[str, tuple[Pattern, Conjunction]] = {}
    for text in schema.get("patternProperties", ()):
        pattern = key_pattern(document, place, text)
        patterns[text] = (pattern, document.part(place, "patternProperties", text))
    properties: dict[str, Conjunction] = {}
    for name in schema.get("properties", ()):
        conj: Conjunction = document.part(place, "properties", name)
        for text, (pattern, more) in patterns.items():
            if _matches(pattern, name, join_pointer(pointer, "patternProperties", text)):
                conj = conjoin(conj, more)
        properties[name] = conj
    rest: Conjunction = (
        document.part(place, "additionalProperties") if "additionalProperties" in schema else ()
    )
    blocked: Blocked = ()
    names: Conjunction = ()
    if "propertyNames" in schema and schema["propertyNames"] not in (True, {}):
        if schema["propertyNames"] is False:
            high = 0
        else:
            names = (document.subschema(place, "propertyNames"),)
    if high is not None and low > high:
        return None
    required = tuple(schema.get("required", ()))
    high = None if high is None else int(high)
    return Object(properties, required, patterns, rest, low, high, blocked, names)


def _matches(pattern: Pattern, name: str, pointer: str) -> bool:
    try:
        return pattern.matches(name)
    except PatternError as error:
        refuse("patternProperties", pointer, str(error))


_CONSTRAINTS: dict[str, Callable[[Document, int, dict], Constraint | None]] = {
    "null": lambda document, place, schema: Null(),
    "boolean": lambda document, place, schema: Boolean(),
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
}
