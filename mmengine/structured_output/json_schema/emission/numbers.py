"""Writes number constraints as schemas for the grammar engine.

The schemas limit the digits. They also work around errors that the grammar engine makes in ranges.
"""

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor, inf, nextafter

from msgspec.structs import replace

from mmengine.structured_output.json_pointer import join_pointer
from mmengine.structured_output.json_schema.constraints.json_types import Limit, Number, intersect
from mmengine.structured_output.json_schema.emission.bounds import MAX_PLACES, Bounds
from mmengine.structured_output.json_schema.vocabulary.keywords import (
    EXACT,
    count_decimals,
    show_value,
    to_fraction,
    to_number,
)
from mmengine.structured_output.json_schema.vocabulary.notes import Notes
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

DOUBLE = 15  # Number of decimal digits that a double always represents exactly.
LARGEST = 2**63 - 1  # Largest 64-bit integer, which is the engine's integer type.
SMALLEST = -(2**63) + 1024  # Smallest limit that the engine accepts.
FARTHEST = 10**18  # The engine treats a range that begins beyond this number as empty.
Json = dict[str, object]


def number_schemas(constraint: Number, bounds: Bounds, notes: Notes, pointer: str) -> list[Json]:
    """Return schemas that together allow the same numbers as `constraint` and the bounds.

    A limit that the engine would round is moved inwards, and a note is added to `notes`. `pointer`: the
    schema's JSON pointer.
    """
    if constraint.values is not None:
        return [{"enum": [to_number(value) for value in constraint.values]}]
    bounded = [constraint]
    places = bounds.decimals or MAX_PLACES
    if (
        bounds.digits and constraint == Number()
    ):  # Without limits in the schema, a single range suffices, and compiles faster.
        ends = {"exclusiveMinimum": -(10**bounds.digits), "exclusiveMaximum": 10**bounds.digits}
        return [{"type": "number", "multipleOf": to_number(Fraction(1, 10**places)), **ends}]
    if bounds.decimals and constraint == Number():
        return [{"type": "number", "multipleOf": 1 / 10**places}]
    if bounds.digits:
        bounded = _intersect_windows(constraint, _limit_digits(bounds.digits, places, constraint.integer))
    elif bounds.decimals and not constraint.integer:
        bounded = _intersect_windows(constraint, _limit_decimals(constraint, places))
    out = []
    for one in bounded:
        exact = one
        if one.low and one.low == constraint.low:
            exact = replace(exact, low=_engine_limit(one.low, one.integer, 1, notes, pointer))
        if one.high and one.high == constraint.high:
            exact = replace(exact, high=_engine_limit(one.high, one.integer, -1, notes, pointer))
        out += _ranges(exact)
    return out


def _intersect_windows(constraint: Number, windows: list[Number]) -> list[Number]:
    narrowed = [intersect(constraint, window) for window in windows]
    return [one for one in narrowed if isinstance(one, Number)] or [constraint]


def _limit_decimals(constraint: Number, places: int) -> list[Number]:
    """Return constraints (windows) for numbers with at most `places` decimal places.

    With an exclusive limit or multipleOf, a fraction has at most 15 digits in all. Rounding to a double then
    cannot cross the limit or miss a multiple.
    """
    if constraint.multiple is not None:
        places = count_decimals(constraint.multiple)
        if not places:
            return [Number()]
        limit = Fraction(10 ** max(1, DOUBLE - places))
        return [Number(low=(-limit, True), high=(limit, True)), Number(integer=True)]
    excluded = [abs(limit[0]) for limit in (constraint.low, constraint.high) if limit and limit[1]]
    before = len(str(int(max(excluded, default=Fraction(0)))))
    if before > DOUBLE - 2:
        limit = Fraction(10 ** (DOUBLE - 2))
        return [Number(False, (-limit, True), (limit, True), Fraction(1, 100)), Number(integer=True)]
    return [Number(multiple=Fraction(1, 10 ** min(places, DOUBLE - before)))]


def _engine_limit(limit: Limit, integer: bool, inwards: int, notes: Notes, pointer: str) -> Limit:
    """Return `limit` if the engine reads its value exactly, otherwise the nearest exact float inside the
    range.

    `inwards` is 1 for a lower limit and -1 for an upper limit.
    """
    value, exclusive = limit
    if abs(value) <= EXACT:
        return limit
    if integer:
        value = Fraction(ceil(value) if inwards > 0 else floor(value))
        value += inwards * (exclusive and value == limit[0])
        # The engine reads 2**63 - 1 as 2**63. As upper limits, both allow the same 64-bit integers.
        if inwards < 0 and value == LARGEST:
            return (value, False)
    keyword = ("exclusive" if exclusive else "") + ("Minimum" if inwards > 0 else "Maximum")
    keyword = keyword[0].lower() + keyword[1:]
    if value * inwards > FARTHEST:
        refuse(
            keyword,
            join_pointer(pointer, keyword),
            f"{show_value(to_number(limit[0]))} is too large to be enforced",
        )
    if value * inwards < -LARGEST:
        widest = (SMALLEST if inwards > 0 else LARGEST) if integer else -inwards * FARTHEST
        found = Fraction(widest)
    else:
        near = float(value)
        read: Callable[[float], Fraction] = (
            Fraction if integer else to_fraction
        )  # For the type "number", the engine reads a limit's decimal digits.
        while (read(near) - value) * inwards < 0 or read(near) == limit[0] and exclusive:
            near = nextafter(near, inwards * inf)
        found = read(near)
    if found != value:
        text = f"numbers this large are not exact; enforced as {to_number(found)}, inclusive"
        notes.add(keyword, join_pointer(pointer, keyword), text, warning=True)
    return (found, False)


def _limit_digits(digits: int, places: int, integer: bool) -> list[Number]:
    """Return constraints (windows) for numbers with up to `digits` digits.

    `integer`: whether only integers are allowed. Larger fractions have fewer decimal places, so that a double
    can represent each fraction, and rounding crosses no limit.
    """

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


def _ranges(constraint: Number) -> list[Json]:
    schema: Json = {"type": "integer" if constraint.integer else "number"}
    if constraint.multiple is not None and not (constraint.integer and constraint.multiple == 1):
        schema["multipleOf"] = to_number(constraint.multiple)
    if constraint.integer:
        if constraint.low:
            low = ceil(constraint.low[0])
            schema["minimum"] = low + (constraint.low[1] and low == constraint.low[0])
        if constraint.high:
            high = floor(constraint.high[0])
            schema["maximum"] = high - (constraint.high[1] and high == constraint.high[0])
        return [schema]
    if constraint.low and constraint.low == constraint.high and constraint.holds(constraint.low[0]):
        return [
            {"const": to_number(constraint.low[0])}
        ]  # The engine compares floats and would find no number in this range.
    for limit, inclusive, exclusive in (
        (
            _exclude_start(constraint.low, constraint.high, 1, constraint.multiple),
            "minimum",
            "exclusiveMinimum",
        ),
        (
            _exclude_start(constraint.high, constraint.low, -1, constraint.multiple),
            "maximum",
            "exclusiveMaximum",
        ),
    ):
        if limit:
            schema[exclusive if limit[1] else inclusive] = to_number(limit[0])
    return [schema, *_missing_points(constraint)]


def _exclude_start(
    near: Limit | None, far: Limit | None, sign: int, multiple: Fraction | None
) -> Limit | None:
    """Return the limit `near`. If `near` is exclusive and the engine would wrongly allow its value, return a
    corrected limit.

    The engine makes this error in some ranges, such as from 2 (exclusive) to 2.5. The corrected limit is the
    next multiple, or the next number with 15 digits.
    """
    if not (near and far and near[1] and near[0].denominator == 1 and sign * near[0] >= 0):
        return near
    if abs(far[0]) // 1 != abs(near[0]):
        return near
    unit = multiple or Fraction(1, 10 ** (DOUBLE - len(str(abs(near[0].numerator)))))
    first = (near[0] // unit + 1) * unit if sign > 0 else -((-near[0]) // unit + 1) * unit
    return (first, False)


def _missing_points(constraint: Number) -> list[Json]:
    """Return schemas for numbers that the engine wrongly excludes from a range.

    Each missing number is the limit, cut to fewer digits: a range up to 10.755 lacks 10.75 and 10.7. A range
    up to 0 lacks 0.0.

    Each missing number becomes a range that contains no other number: 10.7 becomes a range from 10.7 to below
    10.8 with the step 0.1. With the limit 10.05, the range for 10 also allows the spelling 10.0.
    """
    out = []
    for limit in (constraint.low, constraint.high):
        if limit is None or (limit is constraint.low) != (limit[0] < 0):
            continue
        if limit[0] == 0 and constraint.holds(limit[0]):
            out.append({"type": "number", "multipleOf": 0.1, "minimum": 0, "exclusiveMaximum": 0.1})
        sign = -1 if limit[0] < 0 else 1
        for places in range(1, min(count_decimals(limit[0]), MAX_PLACES + 1)):
            unit = Fraction(1, 10**places)
            point = sign * (abs(limit[0]) // unit) * unit
            if constraint.holds(point):
                ends = ("minimum", "exclusiveMaximum") if sign > 0 else ("maximum", "exclusiveMinimum")
                near, far = to_number(point), to_number(point + sign * unit)
                out.append({"type": "number", "multipleOf": to_number(unit), ends[0]: near, ends[1]: far})
                # The engine divides floats, so it may find no multiple in the range above.
                out.append({"const": near})
    return out
