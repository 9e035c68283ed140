"""Compares shapes: proves that no value has two given shapes, and drops shapes that another shape covers.

A shape maps JSON types to constraints (json_types.py).
"""

from collections.abc import Callable

from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conjunction,
    Constraint,
    Number,
    Object,
    Shape,
    String,
    intersect,
)
from mmengine.structured_output.json_schema.patterns.complement import may_overlap

MAX_COMPARED = 64  # Maximum number of shapes that are compared for a conjunction.
MAX_DEPTH = 3  # Maximum nesting depth of the properties that are compared.

# A function that returns shapes for a conjunction. Every value of the conjunction has one of the shapes.
ShapesOf = Callable[[Conjunction], list[Shape]]


def are_disjoint(shapes_of: ShapesOf, a: Shape, b: Shape, depth: int = 0) -> bool:
    """Return True if it is proven that no value can have both shapes, and False without a proof."""
    return all(
        _constraints_disjoint(shapes_of, constraint, b[kind], depth)
        for kind, constraint in a.items()
        if kind in b
    )


def _constraints_disjoint(shapes_of: ShapesOf, a: Constraint, b: Constraint, depth: int) -> bool:
    match a, b:
        case Boolean(), Boolean():
            return not a.values & b.values
        case Number(), Number():
            return intersect(a, b) is None
        case String(), String():
            if intersect(a, b) is None:
                return True
            exact = [[each.regex for each in constraint.patterns if each.exact] for constraint in (a, b)]
            return any(not may_overlap(x, y) for x in exact[0] for y in exact[1] if x != y)
        case Array(), Array():
            merged = intersect(a, b)
            if not isinstance(merged, Array):
                return True
            places = range(min(merged.low, 16))
            return any(_parts_disjoint(shapes_of, a.item(at), b.item(at), depth) for at in places)
        case Object(), Object():
            if intersect(a, b) is None:
                return True
            names = dict.fromkeys((*a.required, *b.required))
            return any(_parts_disjoint(shapes_of, a.property(n), b.property(n), depth) for n in names)
    return False


def _parts_disjoint(shapes_of: ShapesOf, a: Conjunction, b: Conjunction, depth: int) -> bool:
    """Return whether it is proven that no item or property value satisfies both `a` and `b`."""
    if depth >= MAX_DEPTH:
        return False
    return all(are_disjoint(shapes_of, x, y, depth + 1) for x in shapes_of(a) for y in shapes_of(b))


def simplify_shapes(shapes: list[Shape]) -> list[Shape]:
    """Return the shapes after removing each constraint that another shape's constraint covers.

    Among equal constraints, the first is kept.
    """
    shapes = [shape for shape in shapes if shape]
    if not 1 < len(shapes) <= MAX_COMPARED:
        return shapes
    out: list[Shape] = [dict(shape) for shape in shapes]
    # Reverse order keeps the first among equal constraints. Equal constraints may differ in their key order,
    # and the documented order is the first constraint's.
    for at, shape in reversed(list(enumerate(out))):
        for kind, constraint in list(shape.items()):
            if any(
                kind in other and _covers(other[kind], constraint)
                for place, other in enumerate(out)
                if place != at
            ):
                del shape[kind]
    return [shape for shape in out if shape]


def _covers(big: Constraint, small: Constraint) -> bool:
    if not isinstance(big, Object) or not isinstance(small, Object):
        return big == small or intersect(big, small) == small
    if big.blocked or big.patterns.keys() != small.patterns.keys():
        return False
    names = dict.fromkeys((*big.properties, *small.properties))
    return (
        set(big.required) <= set(small.required)
        and big.low <= small.low
        and (big.high is None or small.high is not None and small.high <= big.high)
        and all(set(big.property(name)) <= set(small.property(name)) for name in names)
        and all(set(big.patterns[text][1]) <= set(small.patterns[text][1]) for text in big.patterns)
        and set(big.rest) <= set(small.rest)
    )
