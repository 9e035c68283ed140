"""Writes notes on schemas that xgrammar narrows, because it fixes the order of an object's keys."""

import json
from collections.abc import Iterator
from functools import lru_cache

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.patterns.other_keys import Json, expand_other_keys
from mmengine.structured_output.json_schema.rewriting.key_order import MARK, describe_order
from mmengine.structured_output.json_schema.vocabulary.notes import Note, Notes

WHY = "grammar_backend xgrammar supports no other order"


@lru_cache(maxsize=64)
def order_notes(text: str) -> tuple[Note, ...]:
    """Return a note on each object whose keys llguidance would accept in other orders."""
    notes, waiting = Notes(), [(json.loads(text), "")] if f'"{MARK}"' in text else []
    for schema, pointer in waiting:
        if MARK in schema:
            names = [name for name, part in schema.get("properties", {}).items() if part is not False]
            notes.add("properties", pointer, describe_order(names, WHY))
        waiting += _parts(expand_other_keys(schema, spelled_out=False), pointer)
    return notes.all()


def _parts(schema: Json, pointer: str) -> Iterator[tuple[Json, str]]:
    """Return the schemas directly inside a schema, with their JSON pointers."""
    for keyword in ("anyOf", "prefixItems", "$defs", "properties", "patternProperties"):
        inside = schema.get(keyword)
        listed = enumerate(inside) if isinstance(inside, list) else ()
        for key, part in inside.items() if isinstance(inside, dict) else listed:
            if isinstance(part, dict):
                yield part, join_pointer(pointer, keyword, key)
    for keyword in ("items", "additionalProperties"):
        part = schema.get(keyword)
        if isinstance(part, dict):
            yield part, join_pointer(pointer, keyword)
