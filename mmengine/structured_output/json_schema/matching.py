"""Whether the names in `properties` match the patterns in `patternProperties`.

Python's own matcher goes back and tries again, for some patterns longer than anybody waits, and nothing else
in the process runs meanwhile. So all states that a pattern can be in are followed at once, in a time that
states and characters bound (K. Thompson, Regular Expression Search Algorithm, CACM 1968).
"""

import re
from collections.abc import Container, Iterable
from typing import NamedTuple

from mmengine.structured_output.json_schema.characters import PatternError

MAX_STEPS = 2_000_000  # of one schema: states that are looked at
MAX_CROWD = (
    150  # states that a pattern may be in at once: the grammar engine's answer ends beyond some hundreds
)
CROWD_CHARS = 48  # characters after which that is known
MAX_CROWD_CHARS = 8  # different ones that are tried
STATE_COST = 10  # steps that making a state counts for
_TOKEN = re.compile(
    r"\(\?s:\.\)|\(\?:|\[(?:[^\]\\]|\\.)*\]|\\(?:x[0-9A-F]{2}|u[0-9A-F]{4}|U[0-9A-F]{8}|.)"
    r"|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Budget:
    """Of one schema, for all its patterns and names together."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps
        self.machines: dict[str, Machine] = {}  # by pattern

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise PatternError("it takes too long to compare it with names and values; use fewer of both")

    def matches(self, regex: str, text: str) -> bool:
        """Whether `regex`, as pattern.py writes it and without \\p, matches all of `text`. Raises
        PatternError where the schema asks for too much of this."""
        return self.machine(regex).matches(text)

    def machine(self, regex: str) -> "Machine":
        if "\\p" in regex or "\\P" in regex:
            raise PatternError("with \\p it cannot be compared with names and other patterns")
        if regex not in self.machines:
            self.machines[regex] = Machine(regex, self)
        return self.machines[regex]


def check_crowd(regex: str, points: list[int]) -> None:
    """PatternError where a text puts the pattern in too many states at once, as counted repetitions of one
    another do whose ends cannot be told. `points`: a character of each set of the pattern."""
    machine = Machine(regex, Budget())
    chars = [chr(point) for point in dict.fromkeys(points)][:MAX_CROWD_CHARS]
    now = machine.first()
    for _ in range(CROWD_CHARS):
        now = max((machine.behind(now, char) for char in chars), key=len)
        if len(now) > MAX_CROWD:
            raise PatternError(
                "its counted repetitions can be told apart in too many ways; count one of them, or end each "
                "with a character that it does not hold"
            )


class Repeat(NamedTuple):
    part: "str | list"
    low: int
    high: int | None


class Machine:
    """A pattern as states. A state has a token, and a character that the token matches leads to the state
    behind it; or no token, and is all of the states behind it at once. A part of a pattern is a token, a
    Repeat, or a list of alternatives, each a list of parts."""

    def __init__(self, regex: str, budget: Budget) -> None:
        self._budget = budget
        self._tests: dict[str, re.Pattern[str]] = {}  # by token
        self.states: list[tuple[str, tuple[int, ...]]] = [("", ())]  # the first is the end
        self.start = self._made(_alternatives(_TOKEN.findall(regex)[::-1]), 0)

    def matches(self, text: str) -> bool:
        now = self.first()
        for char in text:
            now = self.behind(now, char)
        return self.ends(now)

    def tokens(self) -> Iterable[str]:
        return self._tests

    def first(self) -> set[int]:
        """All states that the pattern is in before a text."""
        return self.reached([self.start])

    def behind(self, now: Iterable[int], char: str) -> set[int]:
        """All states that the pattern is in when a character has followed."""
        steps = (self.states[place] for place in now)
        return self.reached(
            [after[0] for token, after in steps if token and self._tests[token].fullmatch(char)]
        )

    def ends(self, now: Container[int]) -> bool:
        return 0 in now

    def reached(self, waiting: list[int]) -> set[int]:
        """The states that these are all at once; takes from `waiting`."""
        found: set[int] = set()
        while waiting:
            place = waiting.pop()
            if place not in found:
                found.add(place)
                token, after = self.states[place]
                if not token:
                    waiting += after
        self._budget.spend(len(found) + 1)
        return found

    def _state(self, token: str, *after: int) -> int:
        self._budget.spend(STATE_COST)
        self.states.append((token, after))
        return len(self.states) - 1

    def _made(self, part: str | Repeat | list, after: int) -> int:
        """The state where a part begins behind which `after` stands."""
        if isinstance(part, str):
            if part not in self._tests:
                self._tests[part] = re.compile(part, re.DOTALL)
            return self._state(part, after)
        if isinstance(part, list):
            return self._state("", *(self._sequence(parts, after) for parts in part))
        if part.high is None:
            start = self._state("")
            self.states[start] = ("", (self._made(part.part, start), after))
        else:
            start = after
            for _ in range(part.high - part.low):
                start = self._state("", self._made(part.part, start), after)
        for _ in range(part.low):
            start = self._made(part.part, start)
        return start

    def _sequence(self, parts: list, after: int) -> int:
        for part in reversed(parts):
            after = self._made(part, after)
        return after


def _alternatives(tokens: list[str]) -> list[list]:
    """The alternatives up to the end, or to a `)`; `tokens` in reverse, from which it is taken."""
    out: list[list] = [[]]
    while tokens and tokens[-1] != ")":
        token = tokens.pop()
        if token == "|":
            out.append([])
            continue
        part: str | list = token
        if token == "(?:":
            part = _alternatives(tokens)
            tokens.pop()
        if tokens and (tokens[-1] in _TIMES or tokens[-1][0] == "{"):
            out[-1].append(Repeat(part, *_times(tokens.pop())))
        else:
            out[-1].append(part)
    return out


def _times(token: str) -> tuple[int, int | None]:
    if token in _TIMES:
        return _TIMES[token]
    low, comma, high = token[1:-1].partition(",")
    return int(low), int(high) if high else None if comma else int(low)
