"""Fewer shapes that together allow the same: what another one allows anyway is left out."""

from mmengine.structured_output.json_schema.pieces import Object, Piece, Shape, intersect

MAX_COMPARED = 64  # shapes of one place


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
