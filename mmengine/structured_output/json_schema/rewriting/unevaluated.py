"""Expands unevaluatedProperties and unevaluatedItems, if it is known which subschemas the value satisfies.

The keywords restrict only keys and items that no other subschema evaluates. In an anyOf, only the subschemas
that the value satisfies evaluate its keys. Therefore, the caller expands the keywords separately for each set
of subschemas that a value may satisfy.

A place is a schema's index in the document. For conjunction and shape, see constraints/json_types.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.json_types import (
    UNCONSTRAINED,
    Array,
    Conjunction,
    Object,
    Shape,
)
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.reading.document import Document
from mmengine.structured_output.json_schema.rewriting.keyword_shapes import key_pattern
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")


@dataclass(slots=True)
class Evaluated:
    """The keys and items that subschemas evaluate. `items`: how many items at the beginning are evaluated."""

    names: dict[str, None] = field(default_factory=dict)
    # Pattern text -> a place with this pattern.
    patterns: dict[str, int] = field(default_factory=dict)
    all_names: bool = False
    items: int = 0
    all_items: bool = False
    # Places of `contains` schemas. Items that match count as evaluated.
    contains: dict[int, None] = field(default_factory=dict)


def restricts_unevaluated(schema: dict | bool) -> bool:
    """Return whether the schema restricts unevaluated properties or items."""
    return isinstance(schema, dict) and any(schema.get(name, True) not in (True, {}) for name in KEYWORDS)


def unevaluated_shape(
    document: Document,
    place: int,
    held: Mapping[int, list[int]],
    union: Callable[[list[Conjunction]], Conjunction],
) -> Shape:
    """Return the shape that the unevaluated keywords at `place` require.

    `held` maps a place to the direct subschemas that the same value satisfies.
    """
    found = Evaluated()
    _evaluate(document, place, found, held, {place}, own=True)
    schema = document.nodes[place].schema
    assert isinstance(schema, dict)
    shape = dict(UNCONSTRAINED)
    if schema.get("unevaluatedProperties", True) not in (True, {}) and not found.all_names:
        rest: Conjunction = (document.subschema(place, "unevaluatedProperties"),)
        patterns: dict[str, tuple[Pattern, Conjunction]] = {
            text: (key_pattern(document, at, text), ()) for text, at in found.patterns.items()
        }
        shape["object"] = Object(dict.fromkeys(found.names, ()), (), patterns, rest)
    if schema.get("unevaluatedItems", True) not in (True, {}) and not found.all_items:
        rest = (document.subschema(place, "unevaluatedItems"),)
        if found.contains:
            rest = union([*((at,) for at in found.contains), rest])
        shape["array"] = Array(prefix=((),) * found.items, rest=rest)
    return shape


def _evaluate(
    document: Document, place: int, found: Evaluated, held: Mapping[int, list[int]], seen: set[int], own: bool
) -> None:
    schema = document.nodes[place].schema
    if isinstance(schema, dict):
        found.names |= dict.fromkeys(schema.get("properties", ()))
        found.patterns |= dict.fromkeys(schema.get("patternProperties", ()), place)
        found.all_names |= "additionalProperties" in schema
        found.items = max(found.items, len(schema.get("prefixItems", ())))
        found.all_items |= "items" in schema
        if not own:
            found.all_names |= "unevaluatedProperties" in schema
            found.all_items |= "unevaluatedItems" in schema
        if "contains" in schema:
            found.contains[document.subschema(place, "contains")] = None
    for below in held.get(place, ()):
        if below not in seen:
            seen.add(below)
            _evaluate(document, below, found, held, seen, own=False)


def check_alternatives_decided(document: Document, place: int, path: tuple[int, ...], above: int) -> None:
    """Refuse the unevaluated keyword at `above` if an anyOf or `if` at `place` was reached by another path.

    `path`: the places on the path by which the expansion first reached `place`. If the path does not contain
    `above`, the expansion may not have recorded which subschemas the value satisfies.
    """
    schema = document.nodes[place].schema
    if above not in path and isinstance(schema, dict) and {"anyOf", "if"} & set(schema):
        keyword = next(name for name in KEYWORDS if name in document.nodes[above].schema)  # type: ignore[operator]
        pointer = join_pointer(document.nodes[above].pointer, keyword)
        refuse(keyword, pointer, "depends on alternatives that other schemas share")
