"""Whether no value can have both of two shapes. True is proved; False means only that it was not."""

from collections.abc import Callable

from mmengine.structured_output.json_schema.exclusion import meet
from mmengine.structured_output.json_schema.pieces import (
    Array,
    Boolean,
    Conj,
    Number,
    Object,
    Piece,
    Shape,
    String,
    intersect,
)

MAX_DEPTH = 3  # of properties in which two branches are told apart

ShapesOf = Callable[[Conj], list[Shape]]  # one of which a value of the conjunction must have


def disjoint(shapes_of: ShapesOf, a: Shape, b: Shape, depth: int = 0) -> bool:
    return all(_apart(shapes_of, piece, b[kind], depth) for kind, piece in a.items() if kind in b)


def _apart(shapes_of: ShapesOf, a: Piece, b: Piece, depth: int) -> bool:
    match a, b:
        case Boolean(), Boolean():
            return not a.values & b.values
        case Number(), Number():
            return intersect(a, b) is None
        case String(), String():
            if intersect(a, b) is None:
                return True
            exact = [[each.regex for each in piece.patterns if each.exact] for piece in (a, b)]
            return any(not meet(x, y) for x in exact[0] for y in exact[1] if x != y)
        case Array(), Array():
            merged = intersect(a, b)
            if not isinstance(merged, Array):
                return True
            places = range(min(merged.low, 16))
            return any(_parts_apart(shapes_of, a.item(at), b.item(at), depth) for at in places)
        case Object(), Object():
            if intersect(a, b) is None:
                return True
            names = dict.fromkeys((*a.required, *b.required))
            return any(_parts_apart(shapes_of, a.property(n), b.property(n), depth) for n in names)
    return False


def _parts_apart(shapes_of: ShapesOf, a: Conj, b: Conj, depth: int) -> bool:
    """Of a part that a value of both shapes has."""
    if depth >= MAX_DEPTH:
        return False
    return all(disjoint(shapes_of, x, y, depth + 1) for x in shapes_of(a) for y in shapes_of(b))
