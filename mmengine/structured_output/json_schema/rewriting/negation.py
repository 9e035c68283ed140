"""Excludes the values of a shape B from a shape A, for `not`, `oneOf` and `if`.

The result is a list of alternatives. Each alternative violates B in another way. `A and not B` is computed
directly, because the complement of B alone often needs infinitely many alternatives. Since A already
restricts the values, many alternatives are unnecessary:

* A key that A forbids needs no alternative.
* An item or a property needs no alternative if A's schema for this part implies B's schema.
* If no value of an item satisfies both A and B, every list with this item violates B. Later items then need
  no alternatives.

Values that cannot be expressed become a blocked constraint; a schema that uses this constraint is refused.
OMITTED_ALTERNATIVES describes the alternatives that are left out because few authors intend them.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Protocol

import msgspec
from msgspec.structs import replace

from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Boolean,
    Conjunction,
    Constraint,
    Null,
    Number,
    Object,
    Shape,
    String,
    intersect,
    settle_number,
)
from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.complement import complement_pattern, exclude_values
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget

MAX_VALUES = 64  # Maximum number of numbers that are excluded one by one.
MAX_STEPS = 64  # Maximum number of multiples between two limits that are excluded one by one.
MAX_PLACES = 16  # Maximum number of items after a list's prefix that get an alternative.
OMITTED_ALTERNATIVES = (
    f"a list violates the excluded schema within its first {MAX_PLACES} items, and no answer violates it "
    "only by a format, by a key that neither schema names, or by a key that only the excluded schema names "
    "and whose constraint has no complement (such as the type integer)"
)
# Maximum number of optional properties in `_other_keys`, where each subset of the optional properties becomes
# an alternative.
MAX_OPTIONAL = 5


class Origin(msgspec.Struct, frozen=True):
    """The keyword that excludes a schema, the keyword's JSON pointer, and the message if the exclusion cannot
    be enforced.
    """

    keyword: str
    pointer: str
    trouble: str
    advice: str
    inner: bool = False  # Whether the exclusion concerns an item or a property inside the excluded schema.
    free: bool = False  # Whether A leaves this item or property unrestricted.

    def blocked(self, why: str) -> tuple[str, str, str]:
        return self.keyword, self.pointer, f"{self.trouble} cannot be enforced: {why}; {self.advice}"


class Parts(Protocol):
    """The operations on schemas of items and properties that `Shapes` provides."""

    def complement_of(self, conj: Conjunction, origin: Origin) -> Conjunction: ...

    def is_impossible(self, conj: Conjunction) -> bool: ...

    def allows_anything(self, place: int) -> bool: ...

    def false_schema(self) -> Conjunction: ...


@dataclass(slots=True)
class Exclusion:
    """Computes `A and not B` for shapes.

    `narrow`: whether the result lacks some values of `A and not B`. `stuck`: whether the result has blocked
    constraints.
    """

    parts: Parts
    origin: Origin
    budget: MatchBudget
    narrow: bool = False
    stuck: bool = False
    out: list[Constraint] = field(default_factory=list)

    def shapes(self, a: Shape, b: Shape) -> list[Shape]:
        """Return shapes that together allow the values with shape `a` but not shape `b`."""
        kept: Shape = {}
        more: list[Shape] = []
        for kind, constraint in a.items():
            left = self.constraints(constraint, b[kind]) if kind in b else [constraint]
            if left:
                kept[kind] = left[0]
                more += [{kind: each} for each in left[1:]]
        return [kept, *more] if kept else []

    def constraints(self, a: Constraint, b: Constraint) -> list[Constraint]:
        met = intersect(a, b)
        if met is None or any(self.parts.is_impossible(part) for part in _required_parts(met)):
            return [a]
        if met == a:
            return []
        self.out = []
        if _has_other_fields(b):
            self._blocked(a, "a part of it constrains several items or keys together")
            return self.out
        match a, b:
            case Boolean(), Boolean():
                self._add(replace(a, values=a.values - b.values) if a.values - b.values else None)
            case Number(), Number():
                self._number(a, b)
            case String(), String():
                self._string(a, b)
            case Array(), Array():
                assert isinstance(met, Array)
                self._array(a, b, met)
            case Object(), Object():
                self._object(a, b)
        return self.out

    def _add(self, constraint: Constraint | None) -> None:
        if constraint is not None:
            self.out.append(constraint)

    def _both(self, a: Constraint, b: Constraint) -> None:
        self._add(intersect(a, b))

    def _blocked(self, a: Constraint, why: str) -> None:
        if self.origin.free:
            self.narrow = True
            return
        self.stuck = True
        if not isinstance(a, Null | Boolean):
            self._add(replace(a, blocked=(*a.blocked, self.origin.blocked(why))))

    def _number(self, a: Number, b: Number) -> None:
        if a.values is not None:
            left = tuple(value for value in a.values if not b.holds(value) or not _among(value, b.values))
            self._add(replace(a, values=left) if left else None)
            return
        if b.values is not None:
            self._other_numbers(a, [value for value in b.values if a.holds(value)])
            return
        if b.low:
            self._both(a, Number(high=(b.low[0], not b.low[1])))
        if b.high:
            self._both(a, Number(low=(b.high[0], not b.high[1])))
        inside = intersect(a, Number(low=b.low, high=b.high))
        step = b.step()
        if step is not None and isinstance(inside, Number):
            self._no_multiple(inside, step)
        for each in b.excluded:
            self._both(a, Number(multiple=each))

    def _other_numbers(self, a: Number, values: list[Fraction]) -> None:
        if len(values) > MAX_VALUES:
            self._blocked(a, f"more than {MAX_VALUES} numbers are excluded one by one")
            return
        low = a.low
        for value in sorted(values):
            self._add(settle_number(replace(a, low=low, high=(value, True))))
            low = (value, True)
        self._add(settle_number(replace(a, low=low)))

    def _no_multiple(self, a: Number, step: Fraction) -> None:
        """Add the intervals between multiples of `step`, or a blocked constraint if there are too many
        multiples.
        """
        left = settle_number(replace(a, excluded=(*a.excluded, step)))
        if left is None:
            return
        if a.low is None or a.high is None or (a.high[0] - a.low[0]) / step > MAX_STEPS:
            self._blocked(
                left,
                "numbers that are not whole" if step == 1 else f"numbers that are no multiples of {step}",
            )
            return
        first, last = a.low[0] // step, a.high[0] // step
        for at in range(first, last + 1):
            between = Number(low=(at * step, True), high=((at + 1) * step, True))
            self._both(a, between)

    def _string(self, a: String, b: String) -> None:
        inexact = any(not pattern.exact for pattern in b.patterns)
        if b.values is not None and not inexact:
            try:
                values = tuple(v for v in b.values if all(p.matches(v) for p in b.patterns))
            except PatternError as error:
                self._blocked(a, str(error))
                return
            if a.values is not None:
                left = tuple(value for value in a.values if value not in values)
                self._add(replace(a, values=left) if left else None)
            else:
                self._add(
                    replace(a, patterns=(*a.patterns, exclude_values(values)._replace(budget=self.budget)))
                )
            return
        if b.low:
            self._both(a, String(high=b.low - 1))
        if b.high is not None:
            self._both(a, String(low=b.high + 1))
        for pattern in b.patterns:
            if pattern in a.patterns:
                continue
            if not pattern.exact:
                if self.origin.inner:
                    self.narrow = True
                else:
                    self._blocked(
                        a,
                        "a format is enforced more narrowly than defined",
                    )
                continue
            try:
                if a.values is not None:
                    left = tuple(value for value in a.values if not pattern.matches(value))
                    self._add(replace(a, values=left) if left else None)
                else:
                    other = complement_pattern(pattern.regex)._replace(budget=self.budget)
                    self._both(a, String(patterns=(other,)))
            except PatternError as error:
                self._blocked(a, str(error))

    def _array(self, a: Array, b: Array, met: Array) -> None:
        high = met.high
        for at in range(len(met.prefix) + 1):
            if self.parts.is_impossible(met.item(at)):
                high = at if high is None else min(high, at)
                break
        if b.low > a.low:
            self._both(a, Array(high=b.low - 1))
        if high is not None and (a.high is None or a.high > high):
            self._both(a, Array(low=high + 1))
        last = max(len(a.prefix), len(b.prefix))
        endless = not self._within(b.rest, a.rest)
        places = range(last + MAX_PLACES if endless else last)
        if high is not None:
            places = range(min(high, len(places)))
        self.narrow |= endless and (high is None or high > len(places))
        for at in places:
            if not self._within(b.item(at), a.item(at)):
                failing = self._failing(a.item(at), b.item(at))
                if failing is not None:
                    length = max(len(a.prefix), at + 1)
                    prefix = (*(a.item(place) for place in range(length)),)
                    prefix = (*prefix[:at], failing, *prefix[at + 1 :])
                    self._add(replace(a, low=max(a.low, at + 1), prefix=prefix))

    def _object(self, a: Object, b: Object) -> None:
        nothing = self.parts.false_schema()
        for name in b.required:
            if name not in a.required:
                self._add(replace(a, properties={**a.properties, name: (*a.property(name), *nothing)}))
        names = dict.fromkeys((*a.properties, *a.required, *b.properties, *b.required))
        for name in names:
            failing = self._failing(a.property(name), b.property(name))
            if failing is not None:
                required = tuple(dict.fromkeys((*a.required, name)))
                self._add(replace(a, properties={**a.properties, name: failing}, required=required))
        if b.low > a.low:
            self._both(a, Object(high=b.low - 1))
        if b.high is not None and (a.high is None or b.high < a.high):
            self._both(a, Object(low=b.high + 1))
        self._other_keys(a, b, list(names))

    def _failing(self, ours: Conjunction, theirs: Conjunction) -> Conjunction | None:
        """Return a conjunction for values that satisfy `ours` but not `theirs`.

        Returns None if obviously no such value exists.
        """
        if self._within(theirs, ours) or self.parts.is_impossible(ours):
            return None
        if self.parts.is_impossible((*ours, *theirs)):
            return ours
        free = self.origin.free or all(map(self.parts.allows_anything, ours))
        failing = (*ours, *self.parts.complement_of(theirs, replace(self.origin, inner=True, free=free)))
        return None if self.parts.is_impossible(failing) else failing

    def _within(self, wide: Conjunction, narrow: Conjunction) -> bool:
        """Return whether `narrow` obviously implies `wide`."""
        return all(place in narrow or self.parts.allows_anything(place) for place in wide)

    def _other_keys(self, a: Object, b: Object, names: list[str]) -> None:
        """Add objects with a key that `a` and `b` do not name, and with a value for this key that `b`
        forbids.
        """
        kinds = [(text, conj) for text, (_, conj) in a.patterns.items() if not self.parts.is_impossible(conj)]
        if not kinds and self.parts.is_impossible(a.rest):
            return
        of_patterns = all(
            self._within(conj, a.patterns[text][1] if text in a.patterns else a.rest if not kinds else ())
            for text, (_, conj) in b.patterns.items()
        )
        if (
            of_patterns
            and self._within(b.rest, a.rest)
            and all(self._within(b.rest, conj) for _, conj in kinds)
        ):
            return
        optional = [
            name
            for name in names
            if name not in a.required and not self.parts.is_impossible(a.property(name))
        ]
        simple = not a.patterns and not b.patterns and self.parts.is_impossible((*a.rest, *b.rest))
        if not simple or a.high is not None or len(optional) > MAX_OPTIONAL:
            if self.origin.inner:
                self.narrow = True
                return
            self._blocked(a, "an unnamed key would have another value")
            return
        nothing = self.parts.false_schema()
        for count in range(len(optional) + 1):
            for there in combinations(optional, count):
                gone = {name: (*a.property(name), *nothing) for name in optional if name not in there}
                required = (*a.required, *there)
                low = max(a.low, len(required) + 1)
                self._add(replace(a, properties={**a.properties, **gone}, required=required, low=low))


def _among(value: Fraction, values: tuple[Fraction, ...] | None) -> bool:
    return values is None or value in values


def _required_parts(constraint: Constraint) -> list[Conjunction]:
    """Return the schemas for items or properties that every allowed value contains."""
    if isinstance(constraint, Array):
        return [constraint.item(at) for at in range(min(constraint.low, len(constraint.prefix) + 1))]
    return (
        [constraint.property(name) for name in constraint.required] if isinstance(constraint, Object) else []
    )


_NEGATED_FIELDS: dict[type, frozenset[str]] = {
    Number: frozenset(("integer", "low", "high", "multiple", "values", "excluded")),
    String: frozenset(("low", "high", "patterns", "values")),
    Array: frozenset(("low", "high", "prefix", "rest")),
    Object: frozenset(("properties", "required", "patterns", "rest", "low", "high", "groups")),
}


def _has_other_fields(constraint: Constraint) -> bool:
    """Return whether the constraint restricts values by a field that this module cannot negate."""
    if type(constraint) not in _NEGATED_FIELDS:
        return False
    plain = type(constraint)()
    names = [name for name in constraint.__struct_fields__ if name not in _NEGATED_FIELDS[type(constraint)]]
    return any(getattr(constraint, name) != getattr(plain, name) for name in names)
