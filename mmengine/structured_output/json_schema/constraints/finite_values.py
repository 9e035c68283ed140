"""The values that a schema allows, where they are few enough to list."""

from fractions import Fraction
from itertools import product
from math import ceil, floor, prod

from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf
from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conj,
    Null,
    Number,
    Object,
    Piece,
    String,
)
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.vocabulary.keywords import same, to_number

MAX_DEPTH = 3  # of arrays and objects inside one another
MAX_TRIED = 4_096  # combinations of properties, before minProperties and maxProperties

Values = dict[object, object]  # by what makes two of them the same


def finite_values(conj: Conj, shapes_of: ShapesOf, most: int, depth: int = 0) -> Values | None:
    """All of them, or None where there are more than `most` or it was not found out."""
    out: Values = {}
    for shape in shapes_of(conj):
        for piece in shape.values():
            found = _of_piece(piece, shapes_of, most, depth)
            if found is None:
                return None
            out |= {same(value): value for value in found}
            if len(out) > most:
                return None
    return out


def _of_piece(piece: Piece, shapes_of: ShapesOf, most: int, depth: int) -> list[object] | None:
    match piece:
        case Null():
            return [None]
        case Boolean():
            return list[object](sorted(piece.values))
        case Number():
            return _numbers(piece, most)
        case String():
            if piece.values is None or piece.blocked:
                return None
            try:
                return [value for value in piece.values if all(one.matches(value) for one in piece.patterns)]
            except PatternError:
                return None
        case Array():
            return _arrays(piece, shapes_of, most, depth)
        case Object():
            return _objects(piece, shapes_of, most, depth)


def _numbers(piece: Number, most: int) -> list[object] | None:
    if piece.values is not None:
        return [to_number(value) for value in piece.values]
    unit = piece.multiple if piece.multiple is not None else Fraction(1) if piece.integer else None
    if unit is None or piece.low is None or piece.high is None:
        return None
    first, last = ceil(piece.low[0] / unit), floor(piece.high[0] / unit)
    if last - first > 2 * most:
        return None
    values = (Fraction(number) * unit for number in range(first, last + 1))
    return [to_number(value) for value in values if piece.holds(value)]


def _arrays(piece: Array, shapes_of: ShapesOf, most: int, depth: int) -> list[object] | None:
    if piece.blocked or piece.contains or piece.unique or depth >= MAX_DEPTH:
        return None
    high = piece.high
    if high is None:
        if shapes_of(piece.rest):
            return None
        high = len(piece.prefix)
    if high > most:
        return None
    places = []
    for place in range(high):
        values = finite_values(piece.item(place), shapes_of, most, depth + 1)
        if values is None:
            return None
        places.append(list(values.values()))
    out: list[object] = []
    for length in range(piece.low, high + 1):
        for chosen in product(*places[:length]):
            out.append(list(chosen))
            if len(out) > most:
                return None
    return out


def _objects(piece: Object, shapes_of: ShapesOf, most: int, depth: int) -> list[object] | None:
    if piece.blocked or piece.patterns or shapes_of(piece.rest) or depth >= MAX_DEPTH:
        return None
    names = list(dict.fromkeys((*piece.properties, *piece.required)))
    choices: list[list[tuple[object, ...]]] = []
    for name in names:
        values = finite_values(piece.property(name), shapes_of, most, depth + 1)
        if values is None:
            return None
        choices.append([(value,) for value in values.values()] + ([] if name in piece.required else [()]))
    if prod(map(len, choices)) > MAX_TRIED:
        return None
    out: list[object] = []
    for chosen in product(*choices):
        value = {name: found[0] for name, found in zip(names, chosen) if found}
        if len(value) >= piece.low and (piece.high is None or len(value) <= piece.high):
            out.append(value)
        if len(out) > most:
            return None
    return out
