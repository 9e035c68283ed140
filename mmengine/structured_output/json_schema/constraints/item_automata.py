"""Arrays whose items count together (contains, uniqueItems) as automata over items.

A state knows how many items there were, how many of them each `contains` held for, and, for uniqueItems,
which values were taken. An edge is a schema that the next item has. Where too many sets of values could be
taken, a `Distinct` says the same in one rule with a bit for each value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, combinations

from mmengine.structured_output.json_schema.constraints.comparison import ShapesOf, disjoint
from mmengine.structured_output.json_schema.constraints.finite_values import finite_values
from mmengine.structured_output.json_schema.constraints.json_types import Array, Conj, Contains, both
from mmengine.structured_output.json_schema.vocabulary.refusal import refuse

MAX_EDGES = 4_096
MAX_SMALL = 64  # states of a set of values that are written one by one
MAX_VALUES = 64  # bits of a rule's parameter
MAX_CONTAINS = 4

Make = Callable[[dict | bool, object], Conj]  # a schema that stands nowhere, and a key for it
Complement = Callable[[int], Conj]  # of the schema at a place
State = tuple[int, tuple[int, ...], frozenset[int]]  # items (no more than told apart), held, values taken


class TooMany(Exception):
    """More edges or values than are written one by one."""


@dataclass(slots=True)
class Steps:
    """State 0 is the first; an array may end in `ends`."""

    edges: list[tuple[int, int, Conj]] = field(default_factory=list)  # from, to, the item
    ends: set[int] = field(default_factory=set)

    def parts(self) -> list[Conj]:
        return [part for _, _, part in self.edges]

    def useful(self, yes: set[Conj]) -> "Steps | None":
        """Without the edges that no item has or that lead to no end; None where nothing is left."""
        edges = [edge for edge in self.edges if edge[2] in yes]
        alive, grown = set(self.ends), True
        while grown:
            more = {start for start, to, _ in edges if to in alive} - alive
            alive |= more
            grown = bool(more)
        if 0 not in alive:
            return None
        return Steps([edge for edge in edges if edge[0] in alive and edge[1] in alive], self.ends)


@dataclass(slots=True)
class Distinct:
    """Values of which none comes twice. Of the first `matching` come at least `least` and at most `most`."""

    values: list[Conj]
    low: int
    high: int
    matching: int
    least: int
    most: int

    def parts(self) -> list[Conj]:
        return self.values

    def useful(self, yes: set[Conj]) -> "Distinct | None":
        others = len(self.values) - self.matching
        most = min(self.most, self.matching, self.high)
        rest = min(others, self.high - self.least)
        return None if self.least > most or self.low > most + rest or self.low > self.high else self


Sequence = Steps | Distinct


def sequence_of(piece: Array, shapes_of: ShapesOf, make: Make, complement: Complement) -> Sequence:
    """Of an array with `contains` or `unique`."""
    if len(piece.contains) > MAX_CONTAINS:
        refuse(
            "contains",
            piece.contains[0].pointer,
            f"more than {MAX_CONTAINS} of them cannot be counted together",
        )
    slots = _Slots(piece, shapes_of, make)
    try:
        return _steps(piece, slots, complement, MAX_SMALL if piece.unique else MAX_EDGES)
    except TooMany:
        pass
    distinct = slots.distinct() if piece.unique else None
    if distinct is not None:
        return distinct
    try:
        return _steps(piece, slots, complement, MAX_EDGES)
    except TooMany:
        keyword = "uniqueItems" if piece.unique else "contains"
        pointer = piece.unique or piece.contains[0].pointer
        refuse(keyword, pointer, f"it takes more than {MAX_EDGES:,} steps to count the items")


class _Slots:
    """What the item at each place can be: one of some values, or, where uniqueItems asks for nothing, any."""

    def __init__(self, piece: Array, shapes_of: ShapesOf, make: Make):
        self.piece, self.shapes_of, self.make = piece, shapes_of, make
        self.places = len(piece.prefix) if piece.high is None else min(len(piece.prefix), piece.high)
        self.goes_on = (piece.high is None or piece.high > self.places) and bool(shapes_of(piece.rest))
        self.numbers: dict[object, int] = {}  # of values
        self.consts: list[Conj] = []
        self.values: list[list[int] | None] = []  # by place, the rest behind them
        if piece.unique:
            self._fill()

    def at(self, place: int) -> list[tuple[Conj, int | None]]:
        """Each schema that the item may have, and the number of its value."""
        values = self.values[min(place, self.places)] if self.values else None
        if values is None:
            return [(self.piece.item(place), None)]
        return [(self.consts[number], number) for number in values]

    def _fill(self) -> None:
        piece = self.piece
        items = [piece.item(place) for place in range(self.places + self.goes_on)]
        for item in items:
            found = finite_values(item, self.shapes_of, MAX_VALUES)
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
            self._refuse(f"more than {MAX_VALUES} different values cannot be kept apart")
        for at, values in enumerate(self.values):
            if values is not None:
                continue
            if at == self.places and (piece.high is None or piece.high > self.places + 1):
                self._refuse("its items have no list of values, and what came before cannot be compared")
            for other, item in enumerate(items):
                if other != at and not self._apart(items[at], item):
                    self._refuse(f"items {min(at, other)} and {max(at, other)} may be the same value")

    def _apart(self, a: Conj, b: Conj) -> bool:
        return all(disjoint(self.shapes_of, x, y) for x in self.shapes_of(a) for y in self.shapes_of(b))

    def _refuse(self, why: str) -> None:
        refuse("uniqueItems", self.piece.unique or "", f"{why}; say minItems and maxItems, or use an enum")

    def distinct(self) -> Distinct | None:
        """None where the places differ, or what `contains` holds for cannot be listed."""
        piece = self.piece
        if self.places or len(self.values) != 1 or self.values[0] is None or len(piece.contains) > 1:
            return None
        values, matching, least, most = self.consts, len(self.consts), 0, len(self.consts)
        for one in piece.contains:
            holds = [self.shapes_of(both(value, (one.place,))) for value in values]
            if any("array" in shape or "object" in shape for shapes in holds for shape in shapes):
                return None  # whether these hold is not known yet
            chosen = [value for value, shapes in zip(values, holds) if shapes]
            values = chosen + [value for value, shapes in zip(values, holds) if not shapes]
            matching, least = len(chosen), one.low
            most = matching if one.high is None else one.high
        high = len(values) if piece.high is None else min(piece.high, len(values))
        return Distinct(values, piece.low, high, matching, least, most)


def _steps(piece: Array, slots: _Slots, complement: Complement, most: int) -> Steps:
    first: State = (0, tuple(0 for _ in piece.contains), frozenset())
    numbers: dict[State, int] = {first: 0}
    waiting, out = [first], Steps()
    told = max(len(piece.prefix), piece.low, piece.high or 0)  # behind it items are not counted
    for state in waiting:
        place, held, taken = state
        if place >= piece.low and all(one.low <= count for one, count in zip(piece.contains, held)):
            out.ends.add(numbers[state])
        if place == piece.high or place >= slots.places and not slots.goes_on:
            continue
        for item, number in slots.at(place):
            if number in taken:
                continue
            after = taken if number is None else taken | {number}
            for part, counts in _counted(piece.contains, held, item, complement):
                to: State = (min(place + 1, told), counts, after)
                if to not in numbers:
                    numbers[to] = len(numbers)
                    waiting.append(to)
                out.edges.append((numbers[state], numbers[to], part))
                if len(out.edges) > most:
                    raise TooMany
    return out


def _counted(
    contains: tuple[Contains, ...], held: tuple[int, ...], item: Conj, complement: Complement
) -> list[tuple[Conj, tuple[int, ...]]]:
    """The item as it is with each choice of what `contains` holds for, and how often they then hold.

    Where there is no maxContains it does no harm that an item is not counted: another way counts it.
    """
    open_ones = [at for at, one in enumerate(contains) if one.high is not None or held[at] < one.low]
    out = []
    for chosen in chain.from_iterable(combinations(open_ones, size) for size in range(len(open_ones) + 1)):
        part, counts = item, list(held)
        for at, one in enumerate(contains):
            if at in chosen:
                part = both(part, (one.place,))
                counts[at] += 1
            elif one.high is not None:
                part = both(part, complement(one.place))
        if all(one.high is None or count <= one.high for one, count in zip(contains, counts)):
            out.append((part, tuple(counts)))
    return out
