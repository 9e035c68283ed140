"""Validates a value against a schema that could not be enforced. A reported violation is certain. Some
violations are not found: the number of steps is limited, and patterns are not checked, because a client's
pattern may run for too long.
"""

import json
from collections.abc import Mapping
from itertools import combinations

from mmengine.structured_output.json_pointer import join_pointer, local_target
from mmengine.structured_output.json_schema.vocabulary.dialects import (
    KNOWN_IN,
    SIBLINGS_IGNORED,
    UNSPECIFIED,
    draft_of,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import format_pointer

MAX_STEPS = 2_000  # Maximum number of steps. A step applies a schema to a value, in 2 to 5 µs.
MAX_COMPARISONS = 100_000  # Maximum number of compared values and names. A comparison takes up to 0.2 µs.
MAX_DEPTH = 64  # Maximum nesting depth of schemas and values.
TOO_LARGE = "too large to validate"
_RESOURCE = ("$schema", "$id", "id")  # Keywords of embedded resources.


class _Violation(Exception):
    """Raised for a violation, with the keyword and the JSON pointer to the invalid value."""

    def __init__(self, keyword: str, pointer: str):
        super().__init__(f"{keyword} is violated at {format_pointer(pointer)}")


class _StepLimitReached(Exception):
    pass


def find_violation(schema: object, text: str) -> str:
    """Return a description of the first violation in the JSON `text`, or "" if none is found."""
    try:
        value = json.loads(text)
        _Validator(schema).at(schema, value, "", 0)
    except _Violation as wrong:
        return str(wrong)
    except json.JSONDecodeError:
        return "it is not JSON"
    except (_StepLimitReached, RecursionError, ValueError):
        return TOO_LARGE  # ValueError: Python reads at most 4,300 digits of an integer.
    return ""


class _Validator:
    def __init__(self, root: object):
        self._root, self._left, self._comparisons_left = root, MAX_STEPS, MAX_COMPARISONS
        self._draft = (draft_of(root.get("$schema")) if isinstance(root, Mapping) else None) or UNSPECIFIED
        self._targets: dict[str, object] = {}  # Reference -> schema, to resolve each reference once.

    def at(self, schema: object, value: object, pointer: str, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise _StepLimitReached
        if schema is False:
            raise _Violation("false", pointer)
        if not isinstance(schema, Mapping):
            return
        schema = self._keywords(schema)
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._targets:
                self._targets[reference] = local_target(self._root, reference)
            self.at(self._targets[reference], value, pointer, depth + 1)
        self._plain(schema, value, pointer)
        self._combined(schema, value, pointer, depth)
        if isinstance(value, dict):
            self._object(schema, value, pointer, depth)
        elif isinstance(value, list):
            self._array(schema, value, pointer, depth)

    def _keywords(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        """Return the keywords that have an effect in the schema's draft. Returns {} for an embedded resource,
        because its draft and base URI may differ from the root's.
        """
        if schema is not self._root and any(isinstance(schema.get(name), str) for name in _RESOURCE):
            return {}
        self._count_comparisons(len(schema))
        if self._draft in SIBLINGS_IGNORED and "$ref" in schema:
            return {"$ref": schema["$ref"]}
        return {name: value for name, value in schema.items() if name in KNOWN_IN[self._draft]}

    def _fits(self, schema: object, value: object, pointer: str, depth: int) -> bool:
        try:
            self.at(schema, value, pointer, depth + 1)
        except _Violation:
            return False
        return True

    def _plain(self, schema: Mapping[str, object], value: object, pointer: str) -> None:
        kinds = schema.get("type")
        if kinds is not None:
            names = kinds if isinstance(kinds, list) else [kinds]
            self._count_comparisons(len(names))
            is_null = value is None and schema.get("nullable") is True
            if not is_null and not any(_is_of(name, value) for name in names):
                raise _Violation("type", pointer)
        allowed = schema.get("enum")
        if isinstance(allowed, list) and not any(self._same(value, each) for each in allowed):
            raise _Violation("enum", pointer)
        if "const" in schema and not self._same(value, schema["const"]):
            raise _Violation("const", pointer)
        sizes = {"Length": str, "Items": list, "Properties": dict}
        for name, kind in sizes.items():
            if isinstance(value, kind):
                _in_range(schema, value.__len__(), (f"min{name}", f"max{name}"), pointer)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _in_range(schema, value, ("minimum", "maximum"), pointer)
            for name, beyond in (("exclusiveMinimum", -1), ("exclusiveMaximum", 1)):
                limit = None if self._draft in (3, 4) else _number(schema.get(name))
                if limit is not None and (value - limit) * beyond >= 0:
                    raise _Violation(name, pointer)

    def _combined(self, schema: Mapping[str, object], value: object, pointer: str, depth: int) -> None:
        for each in _list(schema.get("allOf")):
            self.at(each, value, pointer, depth + 1)
        # oneOf is checked like anyOf, because unchecked keywords may make several branches match.
        for keyword in ("anyOf", "oneOf"):
            found = _list(schema.get(keyword))
            if found and not any(self._fits(each, value, pointer, depth) for each in found):
                raise _Violation(keyword, pointer)

    def _object(
        self, schema: Mapping[str, object], value: dict[str, object], pointer: str, depth: int
    ) -> None:
        required = _list(schema.get("required"))
        self._count_comparisons(len(required))
        for name in required:
            if isinstance(name, str) and name not in value:
                raise _Violation("required", join_pointer(pointer, name))
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, each in value.items():
            self.at(known.get(name, others), each, join_pointer(pointer, name), depth + 1)

    def _array(self, schema: Mapping[str, object], value: list[object], pointer: str, depth: int) -> None:
        first = _list(schema.get("prefixItems"))
        for number, each in enumerate(value):
            held = first[number] if number < len(first) else schema.get("items", True)
            self.at(held, each, join_pointer(pointer, number), depth + 1)
        if schema.get("uniqueItems") is True:
            for one, other in combinations(value, 2):
                if self._same(one, other):
                    raise _Violation("uniqueItems", pointer)

    def _same(self, one: object, other: object) -> bool:
        """Return whether two values are equal by JSON Schema's rules: true is not 1, and 1.0 equals 1."""
        self._count_comparisons(1)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(self._same(one[name], other[name]) for name in one)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._same, one, other))
        return one == other

    def _count_comparisons(self, count: int) -> None:
        self._comparisons_left -= count
        if self._comparisons_left < 0:
            raise _StepLimitReached


def _is_of(name: object, value: object) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            is_whole = isinstance(value, float) and value.is_integer()
            return is_whole or (isinstance(value, int) and not isinstance(value, bool))
        case "number":
            return _number(value) is not None
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return True


def _number(value: object) -> int | float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _in_range(schema: Mapping[str, object], value: int | float, names: tuple[str, str], pointer: str) -> None:
    low, high = (_number(schema.get(name)) for name in names)
    if low is not None and value < low:
        raise _Violation(names[0], pointer)
    if high is not None and value > high:
        raise _Violation(names[1], pointer)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
