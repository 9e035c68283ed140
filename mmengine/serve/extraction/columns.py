"""Flattens JSON values to the columns of a table.

The schema alone decides the columns: one for each property, named by its JSON pointer, and the properties of
nested objects in place of the object. An array, and an object whose schema names no properties, is one column
of JSON text. What the schema does not name goes into the column OTHER, as a JSON object from pointers to
values.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from mmengine.serve.extraction.results import JsonValue
from mmengine.structured_output.json_schema.vocabulary.refusal import join_pointer

OTHER = "other"
MAX_COLUMNS = 1_000
_BRANCHES = ("allOf", "anyOf", "oneOf")


def columns_of(schema: object) -> list[str]:
    """Return the JSON pointers of a schema's columns, in its order. [""] for a schema without properties."""
    found: dict[str, None] = {}
    _add(schema, schema, "", frozenset(), found)
    return list(found)


def _add(
    root: object, schema: object, pointer: str, followed: frozenset[str], found: dict[str, None]
) -> None:
    """Add the columns of a schema. `followed`: the references on the way to it. An object that contains
    itself is one column.
    """
    properties = list(_properties(root, schema, followed))
    if not properties:
        found[pointer] = None
    for name, inner, references in properties:
        if len(found) < MAX_COLUMNS:
            _add(root, inner, join_pointer(pointer, name), references, found)


def _properties(
    root: object, schema: object, followed: frozenset[str]
) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield the properties that a schema or one of its branches names, with the references on the way."""
    if not isinstance(schema, Mapping):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        yield from _properties(root, _referred(root, reference), followed | {reference})
    for keyword in _BRANCHES:
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            yield from _properties(root, branch, followed)
    named = schema.get("properties")
    for name, inner in named.items() if isinstance(named, Mapping) else ():
        yield name, inner, followed


def _referred(root: object, reference: str) -> object:
    found = root
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def flatten(value: JsonValue, columns: Sequence[str]) -> dict[str, JsonValue]:
    """Return the cells of a value by column, and undeclared values in OTHER as {pointer: value}. Arrays and
    objects stay as they are.
    """
    known = set(columns)
    inner = {pointer[:end] for pointer in known for end, char in enumerate(pointer) if char == "/"}
    found: dict[str, JsonValue] = {}
    other: dict[str, JsonValue] = {}

    def visit(pointer: str, value: JsonValue) -> None:
        if pointer in known:
            found[pointer] = value
        elif isinstance(value, dict) and pointer in inner:
            for name, each in value.items():
                visit(join_pointer(pointer, name), each)
        elif value is not None or pointer not in inner:
            other[pointer] = value

    visit("", value)
    return {**found, OTHER: other} if other else found


def text_of(value: JsonValue) -> str:
    """Return a cell's text: a text as it is, nothing for null, and JSON for other values."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
