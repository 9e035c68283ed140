"""Finds a field's listed values and keywords in a normalized schema."""

from collections.abc import Iterator
from functools import lru_cache

import msgspec
from msgspec import UNSET

from mmengine.structured_output.field_confidence.spans import MAX_DEPTH, Path
from mmengine.structured_output.json_pointer import local_target

Scalar = str | int | float | bool | None
Schema = dict[str, object]

MAX_VALUES = 64  # With more listed values, `values_at` returns [].
_MAX_SCHEMAS = 256  # Maximum number of visited schemas per field.
_UNIONS = ("anyOf", "oneOf", "allOf")


@lru_cache(maxsize=8)
def _decoded(source: str) -> object:
    return msgspec.json.decode(source)


def values_at(source: str, path: Path) -> list[Scalar]:
    """Return the values that a normalized schema (JSON text) lists for the field at `path`.

    Listed values are those in enum and const, true and false for a boolean, and null. A field with listed
    values may allow other values too: for example, the schema for an optional string lists only null. Returns
    [] if the schema lists no values, or more than MAX_VALUES.
    """
    texts: dict[bytes, Scalar] = {}
    for schema in _schemas_at(source, path):
        for value in _named(schema):
            texts.setdefault(msgspec.json.encode(value), value)
    return list(texts.values()) if len(texts) <= MAX_VALUES else []


def has_keyword(source: str, path: Path, keyword: str) -> bool:
    """Return whether a schema (JSON text) sets `keyword` to true for the value at `path`."""
    return any(schema.get(keyword) is True for schema in _schemas_at(source, path))


@lru_cache(maxsize=4 * MAX_DEPTH)
def _schemas_at(source: str, path: Path) -> list[Schema]:
    """Return the schemas that apply to the value at `path`, or [] for a path longer than MAX_DEPTH. The cache
    stores the results for containers, since the lookup for each contained value uses them again.
    """
    root = _decoded(source)
    if not path:
        return _alternatives(root, [root])
    if len(path) > MAX_DEPTH:
        return []
    around = _schemas_at(source, path[:-1])
    return _alternatives(root, [below for schema in around for below in _below(schema, path[-1])])


def _alternatives(root: object, schemas: list[object]) -> list[Schema]:
    """Return the schemas, and all schemas in their references and unions. Each schema is visited once."""
    pending, seen, found = schemas[::-1], set[int](), list[Schema]()
    while pending and len(found) < _MAX_SCHEMAS:
        each = pending.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        found.append(each)
        if isinstance(reference := each.get("$ref"), str):
            pending.append(local_target(root, reference))
        for union in _UNIONS:
            if isinstance(branches := each.get(union), list):
                pending += reversed(branches)
    return found


def _below(schema: Schema, place: str | int) -> Iterator[object]:
    if isinstance(place, str):
        properties = schema.get("properties")
        known = properties.get(place) if isinstance(properties, dict) else None
        yield schema.get("additionalProperties") if known is None else known
        return
    first = schema.get("prefixItems")
    if isinstance(first, list) and place < len(first):
        yield first[place]
    else:
        yield schema.get("items")


def _named(schema: Schema) -> Iterator[Scalar]:
    values = schema.get("enum")
    if isinstance(values, list):
        yield from (value for value in values if not isinstance(value, (dict, list)))
        return
    constant = schema.get("const", UNSET)
    if constant is not UNSET:
        if constant is None or isinstance(constant, (str, int, float)):
            yield constant
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind == "boolean":
            yield True
            yield False
        elif kind == "null":
            yield None
