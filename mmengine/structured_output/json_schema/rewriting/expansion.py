"""The state of an expansion of in-place keywords ($ref, allOf, anyOf, …), and helpers for reading schemas.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from typing import NamedTuple

import msgspec

from mmengine.structured_output.json_schema.constraints.json_types import (
    UNCONSTRAINED,
    Array,
    Conjunction,
    Object,
    Shape,
    intersect_shapes,
)
from mmengine.structured_output.json_schema.rewriting.alternatives import Choice
from mmengine.structured_output.json_schema.rewriting.negation import Origin
from mmengine.structured_output.json_schema.vocabulary.keywords import ANNOTATIONS, ASSERTIONS


class PendingSchema(NamedTuple):
    """A schema that must be added: its place, and the places on the path to the schema.

    `where`: indices of keywords and list elements, by which schemas are sorted in document order.
    """

    place: int
    path: tuple[int, ...]
    where: tuple[int, ...]


class OpenChoice(NamedTuple):
    """A choice, such as an anyOf, from which no branch is taken yet. `path`, `where`: as in PendingSchema,
    for each branch.
    """

    path: tuple[int, ...]
    where: tuple[int, ...]
    choice: Choice


class Expansion(msgspec.Struct):
    """The state of an expansion: the shapes so far, the schemas that must be added, and the open choices."""

    shapes: list[Shape]  # The shapes so far. A value must have at least one of them.
    todo: list[PendingSchema]
    held: tuple[PendingSchema, ...] = ()  # Every added schema, once for each path that led to it.
    choices: tuple[OpenChoice, ...] = ()
    # Schemas that a value must not match. The shapes do not exclude them yet.
    excluded: tuple[tuple[Conjunction, Origin], ...] = ()
    taken: bool = False  # Whether a branch was chosen for some choice.
    lacks_branches: bool = False  # Whether branches that cannot be enforced were left out.

    def meet(self, shape: Shape) -> None:
        if len(self.shapes) == 1 and self.shapes[0] is UNCONSTRAINED:
            self.shapes = [shape] if shape else []
            return
        self.shapes = [met for each in self.shapes if (met := intersect_shapes(each, shape))]


def property_names(schema: dict) -> tuple[str, ...]:
    """Return the names in `properties` whose schema is not false."""
    return tuple(name for name, value in schema.get("properties", {}).items() if value is not False)


def is_assertion(keyword: str) -> bool:
    """Return whether the keyword restricts values and is not an annotation."""
    return keyword in ASSERTIONS and keyword not in ANNOTATIONS


def places_below(held: dict[int, list[int]], place: int) -> list[int]:
    """Return `place` and all places below `place` whose schemas apply to the same value."""
    out = [place]
    for each in out:  # The list grows during the loop.
        out += [below for below in dict.fromkeys(held.get(each, ())) if below not in out]
    return out


def parts_of(constraint: object) -> list[Conjunction]:
    """Return the schemas for the items of an array or the values of an object."""
    if isinstance(constraint, Array):
        return [*constraint.prefix, constraint.rest]
    if isinstance(constraint, Object):
        return [
            *constraint.properties.values(),
            *(conj for _, conj in constraint.patterns.values()),
            constraint.rest,
        ]
    return []
