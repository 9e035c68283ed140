"""Defines the constraints on values of each JSON type, and intersects constraints.

A constraint combines the keywords of all schemas that apply to a value.

A part is an item or a property. A `Conjunction` has the indices of all schemas that a part must satisfy. The
indices (places) refer to the document's list of schemas. The empty tuple is the schema `true`. A shape maps
each allowed JSON type to a constraint. Intersecting two constraints joins their parts' conjunctions, but does
not expand a conjunction into shapes. shapes.py does so only when the shapes are needed. Recursive schemas
therefore need no special treatment in this module.
"""

from fractions import Fraction
from math import lcm
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.languages import build_languages, combine, write_pattern
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.work import spend_work

MAX_COMPARED = 512  # Maximum number of string values that are matched against patterns in an intersection.
INTERSECTION_COST = 20  # Steps for each intersection, without the steps for its patterns.
# Maximum number of patterns for a string. Each pattern may double the number of states in the grammar engine.
MAX_PATTERNS = 16
MAX_STEPS = 100_000  # Maximum number of steps to match listed string values against a pattern.

Conjunction = tuple[int, ...]
Limit = tuple[Fraction, bool]  # (value, whether the limit is exclusive).
# (keyword, pointer, reason) for keywords that cannot be enforced. If a constraint with such a keyword is
# used, the schema is refused.
Blocked = tuple[tuple[str, str, str], ...]


def conjoin(a: Conjunction, b: Conjunction) -> Conjunction:
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
    # Multiples of these steps are not allowed. The step 1 excludes whole numbers.
    excluded: tuple[Fraction, ...] = ()
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
        """The step between allowed numbers, or None. For example, whole numbers that are multiples of 3/10
        are multiples of 3.
        """
        return Fraction((self.multiple or Fraction(1)).numerator) if self.integer else self.multiple


class String(msgspec.Struct, frozen=True):
    low: int = 0
    high: int | None = None
    patterns: tuple[Pattern, ...] = ()
    values: tuple[str, ...] | None = None
    blocked: Blocked = ()


class Contains(NamedTuple):
    """A `contains` keyword: `low` to `high` items satisfy the schema at `place`."""

    place: int
    low: int
    high: int | None
    pointer: str  # The keyword's pointer.


class Array(msgspec.Struct, frozen=True):
    low: int = 0
    high: int | None = None
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ()
    blocked: Blocked = ()
    contains: tuple[Contains, ...] = ()
    unique: str | None = None  # Pointer to the keyword `uniqueItems` if it is true.

    def counts_together(self) -> bool:
        """Return whether the validity of an item depends on other items."""
        return bool(self.contains) or self.unique is not None and (self.high is None or self.high > 1)

    def item(self, at: int) -> Conjunction:
        return self.prefix[at] if at < len(self.prefix) else self.rest


class Object(msgspec.Struct, frozen=True, eq=False):
    """A constraint on objects.

    `patterns` is keyed by the pattern's text. A named property's conjunction already includes the schemas
    from matching patterns.
    """

    properties: dict[str, Conjunction] = {}
    required: tuple[str, ...] = ()
    patterns: dict[str, tuple[Pattern, Conjunction]] = {}
    rest: Conjunction = ()
    low: int = 0
    high: int | None = None
    blocked: Blocked = ()
    names: Conjunction = ()  # The schema in propertyNames, which key_patterns.py merges into the patterns.
    # Groups of property names. Within a group, the schema's order applies. The groups may come in any order.
    groups: tuple[tuple[str, ...], ...] = ()

    def __eq__(self, other: object) -> bool:
        """Compare without `groups`, which do not restrict values."""
        if not isinstance(other, Object):
            return NotImplemented
        names = (name for name in self.__struct_fields__ if name != "groups")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def property(self, name: str) -> Conjunction:
        """Return the conjunction that the value of the key `name` must satisfy."""
        if name in self.properties:
            return self.properties[name]
        found = [conj for pattern, conj in self.patterns.values() if pattern.matches(name)]
        out: Conjunction = () if found else self.rest
        for conj in found:
            out = conjoin(out, conj)
        return out


Constraint = Null | Boolean | Number | String | Array | Object
Shape = dict[str, Constraint]  # JSON type -> constraint. A missing type is not allowed.
UNCONSTRAINED: Shape = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}


def intersect(a: Constraint, b: Constraint) -> Constraint | None:
    """Intersect two constraints on one JSON type. Returns None if it is obvious that no value satisfies both
    constraints.
    """
    spend_work(INTERSECTION_COST)
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
    out = {kind: intersect(constraint, b[kind]) for kind, constraint in a.items() if kind in b}
    return {kind: constraint for kind, constraint in out.items() if constraint is not None}


def tighter_maximum(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _common(a: tuple | None, b: tuple | None) -> tuple | None:
    if a is None or b is None:
        return b if a is None else a
    wanted = set(b)
    return tuple(value for value in a if value in wanted)


def _numbers(a: Number, b: Number) -> Number | None:
    lows = [limit for limit in (a.low, b.low) if limit]
    highs = [limit for limit in (a.high, b.high) if limit]
    # Limits are pairs (value, is exclusive). If two limits have equal values, the exclusive limit is chosen.
    low = max(lows) if lows else None
    high = min(highs, key=lambda limit: (limit[0], not limit[1])) if highs else None
    multiple = a.multiple or b.multiple
    if a.multiple and b.multiple:
        x, y = a.multiple, b.multiple
        multiple = Fraction(
            lcm(x.numerator * y.denominator, y.numerator * x.denominator), x.denominator * y.denominator
        )
    excluded = tuple(dict.fromkeys((*a.excluded, *b.excluded)))
    values, blocked = _common(a.values, b.values), a.blocked + b.blocked
    return settle_number(Number(a.integer or b.integer, low, high, multiple, values, excluded, blocked))


def settle_number(constraint: Number) -> Number | None:
    """Return the constraint after removing listed values outside its limits, or None if no value is left."""
    if constraint.values is not None:
        values = tuple(value for value in constraint.values if constraint.holds(value))
        return replace(constraint, values=values) if values else None
    low, high = constraint.low, constraint.high
    if low and high and (low[0] > high[0] or low[0] == high[0] and (low[1] or high[1])):
        return None
    step = constraint.step()
    if step and any((step / each).denominator == 1 for each in constraint.excluded):
        return None
    if low and high and step:
        first = -(-low[0] // step) * step
        first += step if first == low[0] and low[1] else 0
        if not Number(low=low, high=high).holds(Fraction(first)):
            return None
    return constraint


def _strings(a: String, b: String) -> String | None:
    low, high = max(a.low, b.low), tighter_maximum(a.high, b.high)
    values = _common(a.values, b.values)
    if values is not None:
        values = tuple(v for v in values if low <= len(v) and (high is None or len(v) <= high))
        if not values:
            return None
    if high is not None and low > high:
        return None
    patterns = tuple(dict.fromkeys(a.patterns + b.patterns))
    if values is not None and len(values) <= MAX_COMPARED:
        values, patterns = _filter_values(values, patterns)
        if not values:
            return None
    blocked = a.blocked + b.blocked
    if values is None and len(patterns) > MAX_PATTERNS and not blocked:
        why = f"more than {MAX_PATTERNS} patterns for one string cannot be enforced together"
        blocked = (("pattern", "", why),)
    return String(low, high, patterns, values, blocked)


def _filter_values(
    values: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[str, ...], tuple[Pattern, ...]]:
    """Return the values that match every checked pattern, and the patterns that could not be checked."""
    left = []
    for pattern in patterns:
        budget = MatchBudget(MAX_STEPS)
        try:
            if not pattern.exact:
                raise PatternError("it matches less than it stands for")
            counted = pattern._replace(budget=budget)
            values = tuple(value for value in values if counted.matches(value))
        except PatternError:
            left.append(pattern)
        spend_work(MAX_STEPS - budget.left)
    return values, tuple(left)


def _arrays(a: Array, b: Array) -> Array | None:
    low, high = max(a.low, b.low), tighter_maximum(a.high, b.high)
    if high is not None and low > high:
        return None
    length = max(len(a.prefix), len(b.prefix))
    prefix = tuple(conjoin(a.item(at), b.item(at)) for at in range(length))
    rest, contains = conjoin(a.rest, b.rest), tuple(dict.fromkeys(a.contains + b.contains))
    return Array(low, high, prefix, rest, a.blocked + b.blocked, contains, a.unique or b.unique)


def _exclusive_pattern(pattern: Pattern, others: list[Pattern]) -> Pattern | None:
    """Return a pattern for keys that match `pattern` and none of `others`. Return None if there are no such
    keys.
    """
    budget = pattern.budget or MatchBudget()
    parts = build_languages([pattern.regex, *(other.regex for other in others)], budget)
    left = combine(parts, lambda has: has[0] and not any(has[1:]), budget)
    return None if left.is_empty() else Pattern(write_pattern(left), None, budget=budget)


def _objects(a: Object, b: Object) -> Object | None:
    low, high = max(a.low, b.low), tighter_maximum(a.high, b.high)
    if high is not None and low > high:
        return None
    blocked = a.blocked + b.blocked
    names = dict.fromkeys((*a.properties, *b.properties))
    properties = {name: conjoin(a.property(name), b.property(name)) for name in names}
    patterns: dict[str, tuple[Pattern, Conjunction]] = {}
    for text in dict.fromkeys((*a.patterns, *b.patterns)):
        ours, theirs = a.patterns.get(text), b.patterns.get(text)
        pattern = (ours or theirs)[0]  # type: ignore[index]
        if ours and theirs:
            conj = conjoin(ours[1], theirs[1])
        else:
            other = b if ours else a
            # `other.rest` applies only to keys that match no pattern in `other`.
            if other.patterns and other.rest:
                try:
                    left = _exclusive_pattern(pattern, [each for each, _ in other.patterns.values()])
                except PatternError as error:
                    blocked += (("patternProperties", "", f"beside other patterns: {error}"),)
                    left = None
                if left is not None:
                    patterns[" and not ".join((text, *other.patterns))] = (left, other.rest)
            one = (ours or theirs)[1]  # type: ignore[index]
            conj = one if other.patterns else conjoin(one, other.rest) if ours else conjoin(other.rest, one)
        patterns[text] = (pattern, conj)
    required = tuple(dict.fromkeys((*a.required, *b.required)))
    return Object(
        properties, required, patterns, conjoin(a.rest, b.rest), low, high, blocked, conjoin(a.names, b.names)
    )
