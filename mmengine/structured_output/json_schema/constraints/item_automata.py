"""Expresses arrays with `contains` or `uniqueItems` as automata over items.

A state consists of the item count, the match count for each `contains`, and (for uniqueItems) the set of
values so far. An edge is the next item's schema. If there are too many states, `DistinctItems` describes the
same arrays with a bit for each value.

The terms part, place, conjunction, constraint and shape are explained in constraints/json_types.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, combinations

from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf, are_disjoint
from mmengine.structured_output.json_schema.constraints.finite_values import list_values
from mmengine.structured_output.json_schema.constraints.json_types import (
    Array,
    Conjunction,
    Contains,
    conjoin,
)
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

MAX_EDGES = 4_096
# If an automaton for uniqueItems has more edges, DistinctItems is tried before a large automaton.
MAX_SMALL = 64
MAX_VALUES = 64  # Maximum number of values, because a rule's parameter has 64 bits, a bit for each value.
MAX_CONTAINS = 4

# A function that registers a new schema under a key, and returns the schema's conjunction.
Make = Callable[[dict | bool, object], Conjunction]
Complement = Callable[[int], Conjunction]  # A function that returns the negated schema of a place.
# (item count up to a maximum, matches for each `contains`, set of values so far).
State = tuple[int, tuple[int, ...], frozenset[int]]


class TooManyEdges(Exception):
    """Raised if the automaton would have more edges than its limit."""


@dataclass(slots=True)
class ItemAutomaton:
    """An automaton over array items. State 0 is the start state. An array may end in the states `ends`."""

    # (state, next state, item's schema).
    edges: list[tuple[int, int, Conjunction]] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def parts(self) -> list[Conjunction]:
        return [part for _, _, part in self.edges]

    def restrict_to(self, satisfied: set[Conjunction]) -> "ItemAutomaton | None":
        """Return the automaton without edges that no item satisfies, and without edges that lead to no end.
        Return None if no array remains. `satisfied`: the schemas that some value satisfies.
        """
        edges = [edge for edge in self.edges if edge[2] in satisfied]
        alive, grown = set(self.ends), True
        while grown:
            more = {start for start, to, _ in edges if to in alive} - alive
            alive |= more
            grown = bool(more)
        if 0 not in alive:
            return None
        return ItemAutomaton([edge for edge in edges if edge[0] in alive and edge[1] in alive], self.ends)


@dataclass(slots=True)
class DistinctItems:
    """An array of `low` to `high` different items from `values`.

    The first `matching` values match `contains`; `least` to `most` items must match.
    """

    values: list[Conjunction]
    low: int
    high: int
    matching: int
    least: int
    most: int

    def parts(self) -> list[Conjunction]:
        return self.values

    def restrict_to(self, satisfied: set[Conjunction]) -> "DistinctItems | None":
        others = len(self.values) - self.matching
        most = min(self.most, self.matching, self.high)
        rest = min(others, self.high - self.least)
        return None if self.least > most or self.low > most + rest or self.low > self.high else self


Sequence = ItemAutomaton | DistinctItems


def build_sequence(constraint: Array, shapes_of: ShapesOf, make: Make, complement: Complement) -> Sequence:
    """Return an ItemAutomaton or DistinctItems for an array with `contains` or `unique`."""
    if len(constraint.contains) > MAX_CONTAINS:
        refuse(
            "contains",
            constraint.contains[0].pointer,
            f"more than {MAX_CONTAINS} contains keywords cannot be counted together",
        )
    slots = _Slots(constraint, shapes_of, make)
    try:
        return _build_automaton(constraint, slots, complement, MAX_SMALL if constraint.unique else MAX_EDGES)
    except TooManyEdges:
        pass
    distinct = slots.distinct() if constraint.unique else None
    if distinct is not None:
        return distinct
    try:
        return _build_automaton(constraint, slots, complement, MAX_EDGES)
    except TooManyEdges:
        keyword = "uniqueItems" if constraint.unique else "contains"
        pointer = constraint.unique or constraint.contains[0].pointer
        refuse(keyword, pointer, f"counting the items takes more than {MAX_EDGES:,} steps")


class _Slots:
    """The possible items at each array index.

    The items at an index are a list of values. Without uniqueItems, or if the values cannot be listed, the
    items are a schema.
    """

    def __init__(self, constraint: Array, shapes_of: ShapesOf, make: Make):
        self.constraint, self.shapes_of, self.make = constraint, shapes_of, make
        self.places = (
            len(constraint.prefix)
            if constraint.high is None
            else min(len(constraint.prefix), constraint.high)
        )
        self.goes_on = (constraint.high is None or constraint.high > self.places) and bool(
            shapes_of(constraint.rest)
        )
        self.numbers: dict[object, int] = {}  # Equality key of a value -> number of the value.
        self.consts: list[Conjunction] = []
        # Value numbers for each array index. The last element applies to all further indices.
        self.values: list[list[int] | None] = []
        if constraint.unique:
            self._fill()

    def at(self, place: int) -> list[tuple[Conjunction, int | None]]:
        """Return (schema, value's number) for each possible item at index `place`.

        The number is None if the values are not listed.
        """
        values = self.values[min(place, self.places)] if self.values else None
        if values is None:
            return [(self.constraint.item(place), None)]
        return [(self.consts[number], number) for number in values]

    def _fill(self) -> None:
        constraint = self.constraint
        items = [constraint.item(place) for place in range(self.places + self.goes_on)]
        for item in items:
            found = list_values(item, self.shapes_of, MAX_VALUES)
            if found is None:
                self.values.append(None)
                continue
            numbers = []
            for key, value in found.items():
                if key not in self.numbers:
                    self.numbers[key] = len(self.consts)
                    self.consts.append(self.make({"const": value}, ("distinct", key)))
                numbers.append(self.numbers[key])
            self.values.append(numbers)
        if len(self.consts) > MAX_VALUES:
            self._refuse(f"more than {MAX_VALUES} different values cannot be distinguished")
        for at, values in enumerate(self.values):
            if values is not None:
                continue
            if at == self.places and (constraint.high is None or constraint.high > self.places + 1):
                self._refuse("the items have no list of values, so earlier items cannot be compared")
            for other, item in enumerate(items):
                if other != at and not self._apart(items[at], item):
                    self._refuse(f"items {min(at, other)} and {max(at, other)} may be the same value")

    def _apart(self, a: Conjunction, b: Conjunction) -> bool:
        return all(are_disjoint(self.shapes_of, x, y) for x in self.shapes_of(a) for y in self.shapes_of(b))

    def _refuse(self, why: str) -> None:
        refuse(
            "uniqueItems", self.constraint.unique or "", f"{why}; set minItems and maxItems, or use an enum"
        )

    def distinct(self) -> DistinctItems | None:
        """Return the array as DistinctItems, or None.

        Returns None for unlisted values, for values that differ between indices, for several `contains`, or
        if it is unknown which values match `contains`.
        """
        constraint = self.constraint
        if self.places or len(self.values) != 1 or self.values[0] is None or len(constraint.contains) > 1:
            return None
        values, matching, least, most = self.consts, len(self.consts), 0, len(self.consts)
        for one in constraint.contains:
            holds = [self.shapes_of(conjoin(value, (one.place,))) for value in values]
            if any("array" in shape or "object" in shape for shapes in holds for shape in shapes):
                return None  # Whether arrays and objects match is not known yet.
            chosen = [value for value, shapes in zip(values, holds) if shapes]
            values = chosen + [value for value, shapes in zip(values, holds) if not shapes]
            matching, least = len(chosen), one.low
            most = matching if one.high is None else one.high
        high = len(values) if constraint.high is None else min(constraint.high, len(values))
        return DistinctItems(values, constraint.low, high, matching, least, most)


def _build_automaton(constraint: Array, slots: _Slots, complement: Complement, most: int) -> ItemAutomaton:
    first: State = (0, tuple(0 for _ in constraint.contains), frozenset())
    numbers: dict[State, int] = {first: 0}
    waiting, out = [first], ItemAutomaton()
    told = max(len(constraint.prefix), constraint.low, constraint.high or 0)  # Maximum item count in a state.
    for state in waiting:
        place, held, taken = state
        if place >= constraint.low and all(one.low <= count for one, count in zip(constraint.contains, held)):
            out.ends.add(numbers[state])
        if place == constraint.high or place >= slots.places and not slots.goes_on:
            continue
        for item, number in slots.at(place):
            if number in taken:
                continue
            after = taken if number is None else taken | {number}
            for part, counts in _count_contains(constraint.contains, held, item, complement):
                to: State = (min(place + 1, told), counts, after)
                if to not in numbers:
                    numbers[to] = len(numbers)
                    waiting.append(to)
                out.edges.append((numbers[state], numbers[to], part))
                if len(out.edges) > most:
                    raise TooManyEdges
    return out


def _count_contains(
    contains: tuple[Contains, ...], held: tuple[int, ...], item: Conjunction, complement: Complement
) -> list[tuple[Conjunction, tuple[int, ...]]]:
    """Return (item's schema, new match counts) for each set of `contains` keywords that the item may match.
    If a keyword outside the set has maxContains, the item must not match this keyword. Otherwise the item may
    match the keyword, but the match is not counted.
    """
    open_ones = [at for at, one in enumerate(contains) if one.high is not None or held[at] < one.low]
    out = []
    for chosen in chain.from_iterable(combinations(open_ones, size) for size in range(len(open_ones) + 1)):
        part, counts = item, list(held)
        for at, one in enumerate(contains):
            if at in chosen:
                part = conjoin(part, (one.place,))
                counts[at] += 1
            elif one.high is not None:
                part = conjoin(part, complement(one.place))
        if all(one.high is None or count <= one.high for one, count in zip(contains, counts)):
            out.append((part, tuple(counts)))
    return out
