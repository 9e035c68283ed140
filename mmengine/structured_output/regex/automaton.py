"""Builds a nondeterministic automaton for a regular expression.

The construction is K. Thompson's (Regular Expression Search Algorithm, CACM 1968): each transition consumes a
single character or none.
"""

from collections.abc import Callable

from mmengine.structured_output.regex.sets import Set, contains
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Repeat, Seq

STATE_COST = 10  # Number of steps counted per new state.


class Automaton:
    """The automaton for a regular expression.

    A state with a character set consumes a character from the set and leads to its successor. A state without
    a set leads to all its successors without consuming a character. State 0 accepts. The automaton passes its
    number of steps to `spend`, which may raise an error to stop the work.
    """

    def __init__(self, node: Node, spend: Callable[[int], None]):
        self._spend = spend
        self.states: list[tuple[Set | None, tuple[int, ...]]] = [(None, ())]
        self.start = self._build(node, 0)

    def sets(self) -> set[Set]:
        return {found for found, _ in self.states if found is not None}

    def first(self) -> frozenset[int]:
        """Return the set of start states."""
        return self.closure([self.start])

    def advance(self, now: frozenset[int], char: str) -> frozenset[int]:
        """Return the states to which the character `char` leads from the states `now`."""
        point, steps = ord(char), [self.states[place] for place in now]
        return self.closure(
            [after[0] for found, after in steps if found is not None and contains(found, point)]
        )

    def closure(self, waiting: list[int]) -> frozenset[int]:
        """Return these states and all states that they reach without consuming a character.

        Empties `waiting`.
        """
        found: set[int] = set()
        while waiting:
            place = waiting.pop()
            if place not in found:
                found.add(place)
                chars, after = self.states[place]
                if chars is None:
                    waiting += after
        self._spend(len(found) + 1)
        return frozenset(found)

    def accepts(self, now: frozenset[int]) -> bool:
        return 0 in now

    def _state(self, chars: Set | None, *after: int) -> int:
        self._spend(STATE_COST)
        self.states.append((chars, after))
        return len(self.states) - 1

    def _build(self, node: Node, after: int) -> int:
        """Add a node's states, which lead to the state `after`. Returns the first state."""
        match node:
            case Chars(ranges=chars):
                return self._state(chars, after)
            case Alt(options=options):
                starts = []
                for option in options:
                    starts.append(self._build(option, after))
                return self._state(None, *starts)
            case Seq(items=items):
                for item in reversed(items):
                    after = self._build(item, after)
                return after
            case Repeat(item=item, low=low, high=high):
                return self._build_repeat(item, low, high, after)
        raise ValueError(f"{node} was not inlined")

    def _build_repeat(self, item: Node, low: int, high: int | None, after: int) -> int:
        if high is None:
            start = self._state(None)
            self.states[start] = (None, (self._build(item, start), after))
        else:
            start = after
            for _ in range(high - low):
                start = self._state(None, self._build(item, start), after)
        for _ in range(low):
            start = self._build(item, start)
        return start
