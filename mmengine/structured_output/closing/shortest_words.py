"""The shortest texts that a pattern allows, or behind a beginning of such a text.

A pattern is read into states with single characters between them (K. Thompson, Regular Expression Search
Algorithm, CACM 1968), and each state knows how many characters its nearest end is away. Several patterns and
a least length together are searched with that as the estimate (A*).

What is found here is only proposed: whoever uses it asks the grammar whether it is so. Nothing is found for a
pattern with parts that are not read here.
"""

import re
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

MAX_STATES = 5_000  # of one pattern
MAX_OPTIONAL = 8  # repetitions that may be left out: more are taken for any number, which has fewer states
MAX_LOOKED_AT = 2_000  # places of a search for several patterns
MAX_BEGINNING = 256  # characters of a beginning behind which is searched
MAX_LEAST = 8_192  # characters of a least length that is looked at
FAR = 1 << 30
# One of each kind of character comes first; a class is looked at by those of them that it holds.
_PLAIN = "a0A" + "".join(map(chr, range(0x20, 0x7F))) + "\t\n\r"
_TOKEN = re.compile(
    r"\(\?s:\.\)|\(\?:|\[(?:[^\]\\]|\\.)*\]|\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^pPbBAzZkxuU])"
    r"|\{\d+(?:,\d*)?\}|[^\\\[]",
    re.DOTALL,
)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Unread(Exception):
    """The pattern has a part that is not read here, or too many."""


class _Repeat(NamedTuple):
    part: "str | list | _Repeat"
    low: int
    high: int | None


class Words:
    """Of one pattern, which matches whole texts. Raises _Unread."""

    def __init__(self, regex: str):
        self._states: list[tuple[str, tuple[int, ...]]] = [("", ())]  # the first is the end
        tokens = _TOKEN.findall(regex)
        if "".join(tokens) != regex:
            raise _Unread
        tokens.reverse()
        start = self._made(_alternatives(tokens), 0)
        if tokens:
            raise _Unread
        self.away = self._distances()
        self.start = self._reached([start])

    def step(self, now: frozenset[int], char: str) -> frozenset[int]:
        steps = (self._states[place] for place in now)
        found = [after[0] for token, after in steps if token and _known(token)[0].fullmatch(char)]
        return self._reached(found)

    def distance(self, now: frozenset[int]) -> int:
        return min((self.away[place] for place in now), default=FAR)

    def nearest(self, now: frozenset[int]) -> str:
        """The shortest way to an end, where there is one."""
        place, out = min(now, key=self.away.__getitem__), []
        while self.away[place]:
            token, after = self._states[place]
            if token:
                out.append(_known(token)[1][0])
                place = after[0]
            else:
                place = min(after, key=self.away.__getitem__)
        return "".join(out)

    def options(self, now: frozenset[int]) -> dict[str, None]:
        """Characters that may follow, one for each way at least."""
        tokens = dict.fromkeys(token for token, _ in (self._states[place] for place in now) if token)
        return dict.fromkeys(char for token in tokens for char in _known(token)[1])

    def _distances(self) -> list[int]:
        """Of each state to the end, in characters: from the end backwards, the nearest first."""
        before: list[list[tuple[int, int]]] = [[] for _ in self._states]
        for place, (token, after) in enumerate(self._states):
            for other in after:
                before[other].append((place, 1 if token else 0))
        away, waiting = [FAR] * len(self._states), [(0, 0)]
        while waiting:
            far, place = heappop(waiting)
            if far < away[place]:
                away[place] = far
                for other, cost in before[place]:
                    heappush(waiting, (far + cost, other))
        return away

    def _reached(self, waiting: list[int]) -> frozenset[int]:
        found: set[int] = set()
        while waiting:
            place = waiting.pop()
            if place not in found:
                found.add(place)
                token, after = self._states[place]
                if not token:
                    waiting += after
        return frozenset(place for place in found if self._states[place][0] or not place)

    def _state(self, token: str, *after: int) -> int:
        if len(self._states) >= MAX_STATES:
            raise _Unread
        self._states.append((token, after))
        return len(self._states) - 1

    def _made(self, part: str | _Repeat | list, after: int) -> int:
        """The state where a part begins behind which `after` stands."""
        if isinstance(part, str):
            _known(part)
            return self._state(part, after)
        if isinstance(part, list):
            return self._state("", *(self._sequence(parts, after) for parts in part))
        if part.high is None:
            start = self._state("")
            self._states[start] = ("", (self._made(part.part, start), after))
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


class Text(NamedTuple):
    """What a text must be: all of `patterns`, of so many characters at least."""

    patterns: tuple[str, ...]
    low: int = 0

    @lru_cache(maxsize=1024)  # noqa: B019 (there is nothing of it but these fields)
    def rest(self, beginning: str) -> str | None:
        """The shortest that makes a text of `beginning`; None where none is found."""
        if len(beginning) > MAX_BEGINNING or self.low > MAX_LEAST:
            return None
        try:
            words = [words_of(pattern) for pattern in self.patterns]
        except _Unread:
            return None
        low = max(0, self.low - len(beginning))
        now = []
        for each in words:
            at = each.start
            for char in beginning:
                at = each.step(at, char)
                if not at:
                    return None
            now.append(at)
        if not words:
            return "a" * low
        if len(words) == 1 and words[0].distance(now[0]) >= low:
            return words[0].nearest(now[0]) if words[0].distance(now[0]) < FAR else None
        return _searched(words, tuple(now), low)


def _searched(words: list[Words], now: tuple[frozenset[int], ...], low: int) -> str | None:
    """A*: of what is equally near the end, what has more behind it is looked at first."""

    def estimate(at: tuple[frozenset[int], ...], size: int) -> int:
        return max(low - size, *(each.distance(one) for each, one in zip(words, at)))

    waiting = [(estimate(now, 0), 0, 0, "", now)]
    seen, count = set(), 0
    while waiting and count < MAX_LOOKED_AT:
        whole, _, _, text, at = heappop(waiting)
        if whole >= FAR:
            return None
        if whole == len(text):
            return text
        if (at, min(len(text), low)) in seen:
            continue
        seen.add((at, min(len(text), low)))
        reached: set[tuple[frozenset[int], ...]] = set()
        for char in words[0].options(at[0]):
            after = tuple(each.step(one, char) for each, one in zip(words, at))
            if all(after) and after not in reached:
                reached.add(after)
                count += 1
                heappush(
                    waiting,
                    (len(text) + 1 + estimate(after, len(text) + 1), -len(text), count, text + char, after),
                )
    return None


@lru_cache(maxsize=1024)
def _known(token: str) -> tuple[re.Pattern[str], str]:
    """What matches a token, and characters that it may be, the best first."""
    try:
        test = re.compile(token, re.DOTALL)
    except re.error:
        raise _Unread from None
    numbers = re.findall(r"\\(?:x(..)|u(....)|U(.{8}))", token)
    written = "".join(chr(int(two or four or eight, 16)) for two, four, eight in numbers) + token
    for some in (_PLAIN, written):
        chars = "".join(char for char in some if test.fullmatch(char))
        if chars:
            return test, chars
    raise _Unread


@lru_cache(maxsize=512)
def _words_or_none(regex: str) -> Words | None:
    try:
        return Words(regex)
    except (_Unread, RecursionError):
        return None


def words_of(regex: str) -> Words:
    found = _words_or_none(regex)
    if found is None:
        raise _Unread
    return found


def _alternatives(tokens: list[str]) -> list[list]:
    """The alternatives up to the end, or to a `)`; `tokens` in reverse, from which it is taken."""
    out: list[list] = [[]]
    while tokens and tokens[-1] != ")":
        token = tokens.pop()
        if token == "|":
            out.append([])
            continue
        part: str | list | _Repeat = token
        if token in ("(?:", "("):
            part = _alternatives(tokens)
            if not tokens:
                raise _Unread
            tokens.pop()
        elif token in ("^", "$") or token in _TIMES or token[0] == "{" and len(token) > 1:
            raise _Unread
        if tokens and (tokens[-1] in _TIMES or tokens[-1][0] == "{" and len(tokens[-1]) > 1):
            part = _Repeat(part, *_times(tokens.pop()))
            if tokens and tokens[-1] == "?":
                tokens.pop()  # as few as can be: the same texts
        out[-1].append(part)
    return out


def _times(token: str) -> tuple[int, int | None]:
    if token in _TIMES:
        return _TIMES[token]
    low, comma, high = token[1:-1].partition(",")
    if not comma:
        return int(low), int(low)
    return int(low), int(high) if high and int(high) - int(low) <= MAX_OPTIONAL else None
