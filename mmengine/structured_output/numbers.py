"""Numbers as the grammar engine takes them: its ranges repaired, and the digits bounded."""

from fractions import Fraction
from math import ceil, floor

from mmengine.structured_output.keywords import decimals
from mmengine.structured_output.pieces import Limit, Number, intersect

DOUBLE = 15  # decimal digits that a double always holds
Json = dict[str, object]


def plain(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def number_schemas(piece: Number, digits: int) -> list[Json]:
    """Alternatives that together allow what `piece` allows, with at most `digits` digits (0: any)."""
    if piece.values is not None:
        return [{"enum": [plain(value) for value in piece.values]}]
    bounded = [piece]
    if digits:
        narrowed = [intersect(piece, window) for window in _windows(digits)]
        bounded = [one for one in narrowed if isinstance(one, Number)] or [piece]
    return [schema for one in bounded for schema in _ranges(one)]


def _windows(digits: int) -> list[Number]:
    """Fewer digits behind the point the larger the number, and integers of all digits."""

    def within(places: int) -> Limit:
        return (Fraction(10**places), True)

    def window(before: int, behind: int) -> Number:
        limit = within(before)
        multiple = Fraction(1, 10**behind) if behind else None
        return Number(behind == 0, (-limit[0], True), limit, multiple)

    total = min(digits, DOUBLE)
    behind = sorted({min(10, total * 2 // 3), total // 3, min(2, total - 1)} - {0}, reverse=True)
    return [window(total - places, places) for places in behind] + [window(digits, 0)]


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
        (piece.low, "minimum", "exclusiveMinimum"),
        (piece.high, "maximum", "exclusiveMaximum"),
    ):
        if limit:
            schema[exclusive if limit[1] else inclusive] = plain(limit[0])
    return [schema, *({"const": plain(point)} for point in _lost_points(piece))]


def _lost_points(piece: Number) -> list[Fraction]:
    """Below a bound like 10.75 the engine's range lacks 10.7: every shorter spelling of the far end."""
    out = []
    for limit in (piece.low, piece.high):
        if limit is None or (limit is piece.low) != (limit[0] < 0):
            continue
        sign = -1 if limit[0] < 0 else 1
        for places in range(1, decimals(limit[0])):
            point = sign * Fraction(floor(abs(limit[0]) * 10**places), 10**places)
            if piece.holds(point) and point not in out:
                out.append(point)
    return out
