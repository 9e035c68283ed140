"""Flattens JSON values to table columns, and lists a value's leaves.

Only the schema determines the columns. A column's name is the property's JSON pointer. Each property of a
nested object has a column. An array, or an object without named properties, has a single column with JSON
text. Values that the schema does not name go into the column OTHER, as a JSON object that maps pointers to
values.
"""

import json
from collections.abc import Iterator, Mapping

from mmengine.serve.extraction.results import JsonValue
from mmengine.structured_output.json_pointer import join_pointer, local_target

OTHER = "other"
MAX_COLUMNS = 1_000
_BRANCHES = ("allOf", "anyOf", "oneOf")


class Columns:
    """The columns of a schema. `names`: their JSON pointers in the schema's order; [""] for a schema without
    properties.
    """

    def __init__(self, schema: object) -> None:
        found: dict[str, None] = {}
        _add(schema, schema, "", frozenset(), found)
        self.names = list(found)
        self._known = frozenset(found)
        self._inner = frozenset(
            pointer[:end] for pointer in found for end, char in enumerate(pointer) if char == "/"
        )

    def flatten(self, value: JsonValue) -> dict[str, JsonValue]:
        """Return a value's cells by column. The cell OTHER maps pointers to undeclared values. Arrays and
        objects stay unchanged.
        """
        found: dict[str, JsonValue] = {}
        other: dict[str, JsonValue] = {}

        def visit(pointer: str, value: JsonValue) -> None:
            if pointer in self._known:
                found[pointer] = value
            elif isinstance(value, dict) and pointer in self._inner:
                for name, each in value.items():
                    visit(join_pointer(pointer, name), each)
            elif value is not None or pointer not in self._inner:
                other[pointer] = value

        visit("", value)
        return {**found, OTHER: other} if other else found

    def column_of(self, pointer: str) -> str:
        """Return the column that holds the value at `pointer`, or "" for a value without a column."""
        while pointer not in self._known and pointer:
            pointer = pointer.rpartition("/")[0]
        return pointer


def _add(
    root: object, schema: object, pointer: str, followed: frozenset[str], found: dict[str, None]
) -> None:
    """Add a schema's columns. `followed`: the references that lead to this schema; each reference is followed
    only once.
    """
    properties = list(_properties(root, schema, followed, set()))
    if not properties:
        found[pointer] = None
    for name, inner, references in properties:
        if len(found) < MAX_COLUMNS:
            _add(root, inner, join_pointer(pointer, name), references, found)


def _properties(
    root: object, schema: object, followed: frozenset[str], seen: set[int]
) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield (name, schema, followed references) for each property in a schema and its branches. `seen`: the
    ids of visited schemas.
    """
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        yield from _properties(root, local_target(root, reference), followed | {reference}, seen)
    for keyword in _BRANCHES:
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _properties(root, branch, followed, seen)
    named = schema.get("properties")
    for name, inner in named.items() if isinstance(named, Mapping) else ():
        yield name, inner, followed


def leaves(value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """Yield the JSON pointer and the value of each scalar, and of each empty array and object."""
    # A stack instead of recursion, because an answer may be nested more deeply than Python's recursion limit.
    pending = [("", value)]
    while pending:
        pointer, each = pending.pop()
        if isinstance(each, dict) and each:
            pending += [(join_pointer(pointer, name), each[name]) for name in reversed(each)]
        elif isinstance(each, list) and each:
            pending += [(join_pointer(pointer, index), each[index]) for index in reversed(range(len(each)))]
        else:
            yield pointer, each


def text_of(value: JsonValue) -> str:
    """Return a cell's text: a string unchanged, "" for null, and JSON text for any other value."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
