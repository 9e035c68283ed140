"""Numbers as the grammar engine takes them: its ranges repaired, and the digits bounded."""

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor, inf, nextafter

from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.json_types import Limit, Number, intersect
from mmengine.structured_output.json_schema.emission.bounds import MAX_PLACES, Bounds
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    EXACT,
    decimals,
    fraction,
    shown,
    to_number,
)
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse, step

DOUBLE = 15  # decimal digits that a double always holds
LARGEST = 2**63 - 1  # the engine's integers have 64 bits
SMALLEST = -(2**63) + 1024  # the least that the engine takes as a bound
FARTHEST = 10**18  # a range that begins beyond it is none to the engine
Json = dict[str, object]


def number_schemas(piece: Number, bounds: Bounds, notes: Notes, pointer: str) -> list[Json]:
    """Alternatives that together allow what `piece` allows, within the bounds.

    A limit that the engine would round is moved inwards, which the notes say; `pointer` is its schema's.
    """
    if piece.values is not None:
        return [{"enum": [to_number(value) for value in piece.values]}]
    bounded = [piece]
    places = bounds.decimals or MAX_PLACES
    if (
        bounds.digits and piece == Number()
    ):  # one range compiles faster than four: there is no limit to lead over
        ends = {"exclusiveMinimum": -(10**bounds.digits), "exclusiveMaximum": 10**bounds.digits}
        return [{"type": "number", "multipleOf": to_number(Fraction(1, 10**places)), **ends}]
    if bounds.decimals and piece == Number():
        return [{"type": "number", "multipleOf": 1 / 10**places}]
    if bounds.digits:
        bounded = _within(piece, _windows(bounds.digits, places, piece.integer))
    elif bounds.decimals and not piece.integer:
        bounded = _within(piece, _steps(piece, places))
    out = []
    for one in bounded:
        exact = one
        if one.low and one.low == piece.low:
            exact = replace(exact, low=_engine_limit(one.low, one.integer, 1, notes, pointer))
        if one.high and one.high == piece.high:
            exact = replace(exact, high=_engine_limit(one.high, one.integer, -1, notes, pointer))
        out += _ranges(exact)
    return out


def _within(piece: Number, windows: list[Number]) -> list[Number]:
    narrowed = [intersect(piece, window) for window in windows]
    return [one for one in narrowed if isinstance(one, Number)] or [piece]


def _steps(piece: Number, places: int) -> list[Number]:
    """Numbers with at most `places` digits behind the point, of which there are fewer where rounding to a
    double might lead over a limit that is excluded, or off a multiple: as many as leave 15 in all."""
    if piece.multiple is not None:
        places = decimals(piece.multiple)
        if not places:
            return [Number()]
        limit = Fraction(10 ** max(1, DOUBLE - places))
        return [Number(low=(-limit, True), high=(limit, True)), Number(integer=True)]
    excluded = [abs(limit[0]) for limit in (piece.low, piece.high) if limit and limit[1]]
    before = len(str(int(max(excluded, default=Fraction(0)))))
    if before > DOUBLE - 2:
        limit = Fraction(10 ** (DOUBLE - 2))
        return [Number(False, (-limit, True), (limit, True), Fraction(1, 100)), Number(integer=True)]
    return [Number(multiple=Fraction(1, 10 ** min(places, DOUBLE - before)))]


def _engine_limit(limit: Limit, integer: bool, inwards: int, notes: Notes, pointer: str) -> Limit:
    """The limit as it is, or the nearest one inwards (1: upwards) that the engine, which reads floats, takes
    exactly."""
    value, exclusive = limit
    if abs(value) <= EXACT:
        return limit
    if integer:
        value = Fraction(ceil(value) if inwards > 0 else floor(value))
        value += inwards * (exclusive and value == limit[0])
        if inwards < 0 and value == LARGEST:  # which the engine reads as 2**63 and takes as this
            return (value, False)
    keyword = ("exclusive" if exclusive else "") + ("Minimum" if inwards > 0 else "Maximum")
    keyword = keyword[0].lower() + keyword[1:]
    if value * inwards > FARTHEST:
        refuse(keyword, step(pointer, keyword), f"{shown(to_number(limit[0]))} is too large to be enforced")
    if value * inwards < -LARGEST:
        widest = (SMALLEST if inwards > 0 else LARGEST) if integer else -inwards * FARTHEST
        found = Fraction(widest)
    else:
        near = float(value)
        read: Callable[[float], Fraction] = Fraction if integer else fraction  # other ranges: by its digits
        while (read(near) - value) * inwards < 0 or read(near) == limit[0] and exclusive:
            near = nextafter(near, inwards * inf)
        found = read(near)
    if found != value:
        text = f"numbers so large are not exact: it is enforced as {to_number(found)}, inclusive"
        notes.say(keyword, step(pointer, keyword), text, warning=True)
    return (found, False)


def _windows(digits: int, places: int, integer: bool) -> list[Number]:
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
    behind = {min(places, share) for share in (total * 2 // 3, total // 3, min(2, total - 1))} - {0}
    return [*(window(total - places, places) for places in sorted(behind, reverse=True)), whole]


def _ranges(piece: Number) -> list[Json]:
    schema: Json = {"type": "integer" if piece.integer else "number"}
    if piece.multiple is not None and not (piece.integer and piece.multiple == 1):
        schema["multipleOf"] = to_number(piece.multiple)
    if piece.integer:
        if piece.low:
            low = ceil(piece.low[0])
            schema["minimum"] = low + (piece.low[1] and low == piece.low[0])
        if piece.high:
            high = floor(piece.high[0])
            schema["maximum"] = high - (piece.high[1] and high == piece.high[0])
        return [schema]
    if piece.low and piece.low == piece.high and piece.holds(piece.low[0]):
        return [
            {"const": to_number(piece.low[0])}
        ]  # a range in which the engine, reading floats, finds nothing
    for limit, inclusive, exclusive in (
        (_inside(piece.low, piece.high, 1, piece.multiple), "minimum", "exclusiveMinimum"),
        (_inside(piece.high, piece.low, -1, piece.multiple), "maximum", "exclusiveMaximum"),
    ):
        if limit:
            schema[exclusive if limit[1] else inclusive] = to_number(limit[0])
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
                near, far = to_number(point), to_number(point + sign * unit)
                out.append({"type": "number", "multipleOf": to_number(unit), ends[0]: near, ends[1]: far})
                out.append({"const": near})  # where the engine, dividing floats, finds no multiple
    return out
