"""What a value of one JSON type may be, as a conjunction of everything that was said about it.

A `Conj` names the schema of a part (an item, a property): a tuple of places of the document that must all
hold. () is the schema true. Intersecting two pieces only joins tuples; what they come to is worked out
when the part itself is (shapes.py), so recursion costs nothing here.
"""

from fractions import Fraction
from math import lcm
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.languages import combined, languages, written
from mmengine.structured_output.json_schema.patterns.matching import Budget
from mmengine.structured_output.json_schema.patterns.pattern import Pattern

MAX_COMPARED = 512  # values of a string that are compared with its patterns
MAX_STEPS = 100_000  # of comparing them with one pattern

Conj = tuple[int, ...]
Limit = tuple[Fraction, bool]  # a bound, and whether it is exclusive
Blocked = tuple[tuple[str, str, str], ...]  # keyword, pointer, why: refused if the piece is ever used


def both(a: Conj, b: Conj) -> Conj:
    return a if a == b or not b else tuple(dict.fromkeys((*a, *b)))


class Null(msgspec.Struct, frozen=True):
    pass


class Boolean(msgspec.Struct, frozen=True):
    values: frozenset[bool] = frozenset((True, False))


class Number(msgspec.Struct, frozen=True):
    integer: bool = False
    low: Limit | None = None
    high: Limit | None = None
    multiple: Fraction | None = None
    values: tuple[Fraction, ...] | None = None
    excluded: tuple[Fraction, ...] = ()  # steps of none of which it is a multiple; 1: it is not whole
    blocked: Blocked = ()

    def holds(self, value: Fraction) -> bool:
        if any((value / step).denominator == 1 for step in self.excluded):
            return False
        if self.integer and value.denominator != 1:
            return False
        if self.low and (value < self.low[0] or value == self.low[0] and self.low[1]):
            return False
        if self.high and (value > self.high[0] or value == self.high[0] and self.high[1]):
            return False
        return self.multiple is None or (value / self.multiple).denominator == 1

    def step(self) -> Fraction | None:
        """What every number of the piece is a multiple of: of 3/10 and whole is a multiple of 3."""
        return Fraction((self.multiple or Fraction(1)).numerator) if self.integer else self.multiple


class String(msgspec.Struct, frozen=True):
    low: int = 0
    high: int | None = None
    patterns: tuple[Pattern, ...] = ()
    values: tuple[str, ...] | None = None
    blocked: Blocked = ()


class Contains(NamedTuple):
    """At least `low` and at most `high` items have the schema at `place`."""

    place: int
    low: int
    high: int | None
    pointer: str  # of the keyword


class Array(msgspec.Struct, frozen=True):
    low: int = 0
    high: int | None = None
    prefix: tuple[Conj, ...] = ()
    rest: Conj = ()
    blocked: Blocked = ()
    contains: tuple[Contains, ...] = ()
    unique: str | None = None  # the pointer of a uniqueItems that is true

    def counts_together(self) -> bool:
        """Whether an item is allowed or not by what the others are."""
        return bool(self.contains) or self.unique is not None and (self.high is None or self.high > 1)

    def item(self, at: int) -> Conj:
        return self.prefix[at] if at < len(self.prefix) else self.rest


class Object(msgspec.Struct, frozen=True, eq=False):
    """`patterns` are keyed by the pattern's text. A named property's Conj holds its patterns' too."""

    properties: dict[str, Conj] = {}
    required: tuple[str, ...] = ()
    patterns: dict[str, tuple[Pattern, Conj]] = {}
    rest: Conj = ()
    low: int = 0
    high: int | None = None
    blocked: Blocked = ()
    names: Conj = ()  # of propertyNames; worked in by key_patterns.py
    # Names as the keywords of the schema bring them, left to right, where other orders are taken too.
    groups: tuple[tuple[str, ...], ...] = ()

    def __eq__(self, other: object) -> bool:
        """Without the groups, which say nothing of what is allowed."""
        if not isinstance(other, Object):
            return NotImplemented
        names = (name for name in self.__struct_fields__ if name != "groups")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def property(self, name: str) -> Conj:
        """What the value of any key must be."""
        if name in self.properties:
            return self.properties[name]
        found = [conj for pattern, conj in self.patterns.values() if pattern.matches(name)]
        out: Conj = () if found else self.rest
        for conj in found:
            out = both(out, conj)
        return out


Piece = Null | Boolean | Number | String | Array | Object
Shape = dict[str, Piece]  # by JSON type; a type that is not there is not allowed
KINDS: Shape = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}


def intersect(a: Piece, b: Piece) -> Piece | None:
    """What both allow; None when that is plainly nothing. The pieces are of one type."""
    match a, b:
        case Null(), Null():
            return a
        case Boolean(), Boolean():
            values = a.values & b.values
            return Boolean(values) if values else None
        case Number(), Number():
            return _numbers(a, b)
        case String(), String():
            return _strings(a, b)
        case Array(), Array():
            return _arrays(a, b)
        case Object(), Object():
            return _objects(a, b)
    raise TypeError(f"{a} and {b} are not of one type")


def intersect_shapes(a: Shape, b: Shape) -> Shape:
    out = {kind: intersect(piece, b[kind]) for kind, piece in a.items() if kind in b}
    return {kind: piece for kind, piece in out.items() if piece is not None}


def least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _common(a: tuple | None, b: tuple | None) -> tuple | None:
    if a is None or b is None:
        return b if a is None else a
    wanted = set(b)
    return tuple(value for value in a if value in wanted)


def _numbers(a: Number, b: Number) -> Number | None:
    lows = [limit for limit in (a.low, b.low) if limit]
    highs = [limit for limit in (a.high, b.high) if limit]
    low = max(lows) if lows else None  # (value, exclusive): of equal values the exclusive one
    high = min(highs, key=lambda limit: (limit[0], not limit[1])) if highs else None
    multiple = a.multiple or b.multiple
    if a.multiple and b.multiple:
        x, y = a.multiple, b.multiple
        multiple = Fraction(
            lcm(x.numerator * y.denominator, y.numerator * x.denominator), x.denominator * y.denominator
        )
    excluded = tuple(dict.fromkeys((*a.excluded, *b.excluded)))
    values, blocked = _common(a.values, b.values), a.blocked + b.blocked
    return settled_number(Number(a.integer or b.integer, low, high, multiple, values, excluded, blocked))


def settled_number(piece: Number) -> Number | None:
    """The piece with its values checked against the rest, or None when its range is empty."""
    if piece.values is not None:
        values = tuple(value for value in piece.values if piece.holds(value))
        return replace(piece, values=values) if values else None
    low, high = piece.low, piece.high
    if low and high and (low[0] > high[0] or low[0] == high[0] and (low[1] or high[1])):
        return None
    step = piece.step()
    if step and any((step / each).denominator == 1 for each in piece.excluded):
        return None
    if low and high and step:
        first = -(-low[0] // step) * step
        first += step if first == low[0] and low[1] else 0
        if not Number(low=low, high=high).holds(Fraction(first)):
            return None
    return piece


def _strings(a: String, b: String) -> String | None:
    low, high = max(a.low, b.low), least(a.high, b.high)
    values = _common(a.values, b.values)
    if values is not None:
        values = tuple(v for v in values if low <= len(v) and (high is None or len(v) <= high))
        if not values:
            return None
    if high is not None and low > high:
        return None
    patterns = tuple(dict.fromkeys(a.patterns + b.patterns))
    if values is not None and len(values) <= MAX_COMPARED:
        values, patterns = _matching(values, patterns)
        if not values:
            return None
    return String(low, high, patterns, values, a.blocked + b.blocked)


def _matching(
    values: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[str, ...], tuple[Pattern, ...]]:
    """The values that match the patterns, and the patterns of which that cannot be said."""
    left = []
    for pattern in patterns:
        try:
            if not pattern.exact:
                raise PatternError("it matches less than it stands for")
            counted = pattern._replace(budget=Budget(MAX_STEPS))
            values = tuple(value for value in values if counted.matches(value))
        except PatternError:
            left.append(pattern)
    return values, tuple(left)


def _arrays(a: Array, b: Array) -> Array | None:
    low, high = max(a.low, b.low), least(a.high, b.high)
    if high is not None and low > high:
        return None
    length = max(len(a.prefix), len(b.prefix))
    prefix = tuple(both(a.item(at), b.item(at)) for at in range(length))
    rest, contains = both(a.rest, b.rest), tuple(dict.fromkeys(a.contains + b.contains))
    return Array(low, high, prefix, rest, a.blocked + b.blocked, contains, a.unique or b.unique)


def _alone(pattern: Pattern, others: list[Pattern]) -> Pattern | None:
    """The keys that match one pattern and none of others; None where there is none."""
    budget = pattern.budget or Budget()
    parts = languages([pattern.regex, *(other.regex for other in others)], budget)
    left = combined(parts, lambda has: has[0] and not any(has[1:]))
    return None if left.is_empty() else Pattern(written(left), None, budget=budget)


def _objects(a: Object, b: Object) -> Object | None:
    low, high = max(a.low, b.low), least(a.high, b.high)
    if high is not None and low > high:
        return None
    blocked = a.blocked + b.blocked
    names = dict.fromkeys((*a.properties, *b.properties))
    properties = {name: both(a.property(name), b.property(name)) for name in names}
    patterns: dict[str, tuple[Pattern, Conj]] = {}
    for text in dict.fromkeys((*a.patterns, *b.patterns)):
        ours, theirs = a.patterns.get(text), b.patterns.get(text)
        pattern = (ours or theirs)[0]  # type: ignore[index]
        if ours and theirs:
            conj = both(ours[1], theirs[1])
        else:
            other = b if ours else a
            # Keys of this pattern may match patterns of the other side too: then its rest does not apply.
            if other.patterns and other.rest:
                try:
                    left = _alone(pattern, [each for each, _ in other.patterns.values()])
                except PatternError as error:
                    blocked += (("patternProperties", "", f"beside other patterns: {error}"),)
                    left = None
                if left is not None:
                    patterns[" and not ".join((text, *other.patterns))] = (left, other.rest)
            one = (ours or theirs)[1]  # type: ignore[index]
            conj = one if other.patterns else both(one, other.rest) if ours else both(other.rest, one)
        patterns[text] = (pattern, conj)
    required = tuple(dict.fromkeys((*a.required, *b.required)))
    return Object(
        properties, required, patterns, both(a.rest, b.rest), low, high, blocked, both(a.names, b.names)
    )
