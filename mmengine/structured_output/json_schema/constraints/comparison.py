"""Whether no value can have both of two shapes. True is proved; False means only that it was not."""

from collections.abc import Callable

from mmengine.structured_output.json_schema.constraints.json_types import (
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
from mmengine.structured_output.json_schema.patterns.complement import meet

MAX_COMPARED = 64  # shapes of one place
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


def simplified(shapes: list[Shape]) -> list[Shape]:
    """The shapes without the pieces that another shape covers; of equal ones the first is kept."""
    shapes = [shape for shape in shapes if shape]
    if not 1 < len(shapes) <= MAX_COMPARED:
        return shapes
    out: list[Shape] = [dict(shape) for shape in shapes]
    for at, shape in reversed(list(enumerate(out))):  # the order of the first is the documented one
        for kind, piece in list(shape.items()):
            if any(
                kind in other and _covers(other[kind], piece)
                for place, other in enumerate(out)
                if place != at
            ):
                del shape[kind]
    return [shape for shape in out if shape]


def _covers(big: Piece, small: Piece) -> bool:
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
