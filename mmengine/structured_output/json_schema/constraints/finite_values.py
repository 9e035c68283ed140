"""Lists all values that a schema allows, if the schema allows only a few.

constraints/json_types.py explains the terms conjunction, constraint and shape.
"""

from fractions import Fraction
from itertools import product
from math import ceil, floor, prod

from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf
from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conjunction,
    Constraint,
    Null,
    Number,
    Object,
    String,
)
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.vocabulary.keywords import equality_key, to_number

MAX_DEPTH = 3  # Maximum nesting depth of arrays and objects.
# Maximum number of combinations of property values, before minProperties and maxProperties are applied.
MAX_TRIED = 4_096

Values = dict[object, object]  # Keyed by `equality_key`.


def list_values(conj: Conjunction, shapes_of: ShapesOf, most: int, depth: int = 0) -> Values | None:
    """Return all values of the conjunction. Return None if there are more than `most` values, or if the
    values cannot be listed.
    """
    out: Values = {}
    for shape in shapes_of(conj):
        for constraint in shape.values():
            found = _list_constraint(constraint, shapes_of, most, depth)
            if found is None:
                return None
            out |= {equality_key(value): value for value in found}
            if len(out) > most:
                return None
    return out


def _list_constraint(
    constraint: Constraint, shapes_of: ShapesOf, most: int, depth: int
) -> list[object] | None:
    match constraint:
        case Null():
            return [None]
        case Boolean():
            return list[object](sorted(constraint.values))
        case Number():
            return _numbers(constraint, most)
        case String():
            if constraint.values is None or constraint.blocked:
                return None
            try:
                return [
                    value
                    for value in constraint.values
                    if all(one.matches(value) for one in constraint.patterns)
                ]
            except PatternError:
                return None
        case Array():
            return _arrays(constraint, shapes_of, most, depth)
        case Object():
            return _objects(constraint, shapes_of, most, depth)


def _numbers(constraint: Number, most: int) -> list[object] | None:
    if constraint.values is not None:
        return [to_number(value) for value in constraint.values]
    unit = (
        constraint.multiple
        if constraint.multiple is not None
        else Fraction(1)
        if constraint.integer
        else None
    )
    if unit is None or constraint.low is None or constraint.high is None:
        return None
    first, last = ceil(constraint.low[0] / unit), floor(constraint.high[0] / unit)
    if last - first > 2 * most:
        return None
    values = (Fraction(number) * unit for number in range(first, last + 1))
    return [to_number(value) for value in values if constraint.holds(value)]


def _arrays(constraint: Array, shapes_of: ShapesOf, most: int, depth: int) -> list[object] | None:
    if constraint.blocked or constraint.contains or constraint.unique or depth >= MAX_DEPTH:
        return None
    high = constraint.high
    if high is None:
        if shapes_of(constraint.rest):
            return None
        high = len(constraint.prefix)
    if high > most:
        return None
    places = []
    for place in range(high):
        values = list_values(constraint.item(place), shapes_of, most, depth + 1)
        if values is None:
            return None
        places.append(list(values.values()))
    out: list[object] = []
    for length in range(constraint.low, high + 1):
        for chosen in product(*places[:length]):
            out.append(list(chosen))
            if len(out) > most:
                return None
    return out


def _objects(constraint: Object, shapes_of: ShapesOf, most: int, depth: int) -> list[object] | None:
    if constraint.blocked or constraint.patterns or shapes_of(constraint.rest) or depth >= MAX_DEPTH:
        return None
    names = list(dict.fromkeys((*constraint.properties, *constraint.required)))
    choices: list[list[tuple[object, ...]]] = []
    for name in names:
        values = list_values(constraint.property(name), shapes_of, most, depth + 1)
        if values is None:
            return None
        choices.append(
            [(value,) for value in values.values()] + ([] if name in constraint.required else [()])
        )
    if prod(map(len, choices)) > MAX_TRIED:
        return None
    out: list[object] = []
    for chosen in product(*choices):
        value = {name: found[0] for name, found in zip(names, chosen) if found}
        if len(value) >= constraint.low and (constraint.high is None or len(value) <= constraint.high):
            out.append(value)
        if len(out) > most:
            return None
    return out
