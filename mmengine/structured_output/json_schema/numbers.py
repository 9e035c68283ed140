"""Numbers as the grammar engine takes them: its ranges repaired, and the digits bounded."""

from dataclasses import replace
from fractions import Fraction
from math import ceil, floor, nextafter

from mmengine.structured_output.json_schema.keywords import EXACT, decimals
from mmengine.structured_output.json_schema.pieces import Limit, Number, intersect

DOUBLE = 15  # decimal digits that a double always holds
LAST = 2**63 - 1  # integer in a limit that the engine takes
MAX_PLACES = 10  # behind the point: finer steps the engine cannot take exactly
Json = dict[str, object]


def plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def number_schemas(piece: Number, digits: int) -> list[Json]:
    """Alternatives that together allow what `piece` allows, with at most `digits` digits (0: any)."""
    if piece.values is not None:
        return [{"enum": [plain(value) for value in piece.values]}]
    bounded = [piece]
    if (
        digits and piece == Number()
    ):  # one range compiles faster than four, and there is no limit to lead over
        ends = {"exclusiveMinimum": -(10**digits), "exclusiveMaximum": 10**digits}
        return [{"type": "number", "multipleOf": plain(Fraction(1, 10**MAX_PLACES)), **ends}]
    out = []
    for within in _within_reach(piece):
        bounded = [within]
        if digits:
            narrowed = [intersect(within, window) for window in _windows(digits, within.integer)]
            bounded = [one for one in narrowed if isinstance(one, Number)] or [within]
        out += [schema for one in bounded for schema in _ranges(one)]
    return out


def _within_reach(piece: Number) -> list[Number]:
    """The engine reads a limit as a double, and of numbers with a fraction it counts the digits of no more
    than 2**53. So beyond that there are only integers, up to the last double within the limit."""
    if all(limit is None or abs(limit[0]) <= EXACT for limit in (piece.low, piece.high)):
        return [piece]
    low = high = None
    if piece.low:
        low = Fraction(_reached(floor(piece.low[0]) + 1 if piece.low[1] else ceil(piece.low[0]))), False
    if piece.high:
        high = Fraction(_reached(ceil(piece.high[0]) - 1 if piece.high[1] else floor(piece.high[0]))), False
    whole = replace(piece, integer=True, low=low, high=high)
    reach = Number(low=(Fraction(-EXACT), False), high=(Fraction(EXACT), False))
    near = None if piece.integer else intersect(piece, reach)
    return [near, whole] if isinstance(near, Number) else [whole]


def _reached(value: int) -> int:
    """The last double on the way from 0 to `value` that the engine takes; or the value, if it is near."""
    value = max(min(value, LAST), -LAST)
    if abs(value) <= EXACT or value == LAST:  # which the engine reads as 2**63, and then takes for what it is
        return value
    double = float(value)
    return int(nextafter(double, 0) if abs(int(double)) > abs(value) else double)


def _windows(digits: int, integer: bool) -> list[Number]:
    """Integers of all digits; unless `integer`, before them fewer digits behind the point the larger the
    number, so that a double holds all of them and rounding leads over no limit."""

    def within(places: int) -> Limit:
        return (Fraction(10**places), True)

    def window(before: int, behind: int) -> Number:
        limit = within(before)
        multiple = Fraction(1, 10**behind) if behind else None
        return Number(behind == 0, (-limit[0], True), limit, multiple)

    whole = window(digits, 0)
    if integer:
        return [whole]
    total = min(digits, DOUBLE)
    behind = sorted({min(MAX_PLACES, total * 2 // 3), total // 3, min(2, total - 1)} - {0}, reverse=True)
    return [*(window(total - places, places) for places in behind), whole]


def _ranges(piece: Number) -> list[Json]:
    schema: Json = {"type": "integer" if piece.integer else "number"}
    if piece.multiple is not None and not (piece.integer and piece.multiple == 1):
        schema["multipleOf"] = plain(piece.multiple)
    if piece.integer:
        if piece.low:
            low = ceil(piece.low[0])
            schema["minimum"] = low + (piece.low[1] and low == piece.low[0])
        if piece.high:
            high = floor(piece.high[0])
            schema["maximum"] = high - (piece.high[1] and high == piece.high[0])
        return [schema]
    for limit, inclusive, exclusive in (
        (_inside(piece.low, piece.high, 1, piece.multiple), "minimum", "exclusiveMinimum"),
        (_inside(piece.high, piece.low, -1, piece.multiple), "maximum", "exclusiveMaximum"),
    ):
        if limit:
            schema[exclusive if limit[1] else inclusive] = plain(limit[0])
    return [schema, *_lost_points(piece)]


def _inside(near: Limit | None, far: Limit | None, sign: int, multiple: Fraction | None) -> Limit | None:
    """Of more than 2 and at most 2.5 the engine's range holds 2 itself: it begins at the next step instead,
    which is the next multiple, or else the next number of 15 digits."""
    if not (near and far and near[1] and near[0].denominator == 1 and sign * near[0] >= 0):
        return near
    if abs(far[0]) // 1 != abs(near[0]):
        return near
    unit = multiple or Fraction(1, 10 ** (DOUBLE - len(str(abs(near[0].numerator)))))
    first = (near[0] // unit + 1) * unit if sign > 0 else -((-near[0]) // unit + 1) * unit
    return (first, False)


def _lost_points(piece: Number) -> list[Json]:
    """Below a bound like 10.75 the engine's range lacks 10.7, every shorter spelling of the far end; below
    0 it lacks 0.0.

    Each is given as the one multiple of 0.1 (0.01, …) from 10.7 to below 10.8, which holds 10.0 too.
    """
    out = []
    for limit in (piece.low, piece.high):
        if limit is None or (limit is piece.low) != (limit[0] < 0):
            continue
        if limit[0] == 0 and piece.holds(limit[0]):
            out.append({"type": "number", "multipleOf": 0.1, "minimum": 0, "exclusiveMaximum": 0.1})
        sign = -1 if limit[0] < 0 else 1
        for places in range(1, min(decimals(limit[0]), MAX_PLACES + 1)):
            unit = Fraction(1, 10**places)
            point = sign * (abs(limit[0]) // unit) * unit
            if piece.holds(point):
                ends = ("minimum", "exclusiveMaximum") if sign > 0 else ("maximum", "exclusiveMinimum")
                near, far = plain(point), plain(point + sign * unit)
                out.append({"type": "number", "multipleOf": plain(unit), ends[0]: near, ends[1]: far})
                out.append({"const": near})  # where the engine, dividing floats, finds no multiple
    return out
