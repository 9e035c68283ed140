"""Finds the shortest text that matches given regex patterns and begins with a given text.

Each pattern becomes an automaton. A state's distance is the number of characters to the accepting state. For
several patterns or a minimum length, an A* search uses the distances as its estimate.

The caller must check the result with the matcher, because large repetition limits are ignored (MAX_OPTIONAL).
Unsupported patterns have no result.
"""

from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from mmengine.structured_output.regex.automaton import Automaton
from mmengine.structured_output.regex.parser import UnsupportedRegex, parse_regex
from mmengine.structured_output.regex.sets import DIGIT, SPACE, WORD, Set, contains
from mmengine.structured_output.regex.tree import Alt, Node, Repeat, Seq

MAX_STATES = 5_000  # Maximum number of states in a pattern's automaton.
# Maximum number of optional repetitions. A larger number is treated as unbounded, which needs fewer states.
MAX_OPTIONAL = 8
MAX_LOOKED_AT = 4_000  # Maximum number of steps in an A* search.
# Equivalent characters are merged only if (number of sets) * (number of characters) is within this limit.
MAX_TOLD_APART = 20_000
MAX_BEGINNING = 256  # Maximum number of characters in a given beginning.
MAX_LEAST = 8_192  # Maximum supported minimum length, in characters.
FAR = 1 << 30
# Candidates for a character in a set, in order of preference: first a letter, a digit and a capital.
_PLAIN = "a0A" + "".join(map(chr, range(0x20, 0x7F))) + "\t\n\r"
_CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}  # Only ASCII characters in these classes are candidates.


class PatternAutomaton(Automaton):
    """The automaton for a pattern that must match the whole text. Raises UnsupportedRegex."""

    def __init__(self, regex: str):
        super().__init__(_with_fewer_states(parse_regex(regex, _CLASSES)), self._check)
        self.away = self._distances()
        self.start_at = self.closure([self.start])

    def _check(self, steps: int) -> None:
        if len(self.states) > MAX_STATES:
            raise UnsupportedRegex(f"has more than {MAX_STATES:,} states")

    def closure(self, waiting: list[int]) -> frozenset[int]:
        """Return the states that are reachable from `waiting` without consuming a character, except states
        that neither consume a character nor accept.

        Omitting those states makes more state sets equal, and the search visits equal sets only once.
        """
        found = super().closure(waiting)
        return frozenset(place for place in found if not place or self.states[place][0] is not None)

    def distance(self, now: frozenset[int]) -> int:
        return min((self.away[place] for place in now), default=FAR)

    def nearest(self, now: frozenset[int]) -> str:
        """Return the shortest text from these states to an accepting state, which must be reachable."""
        place, out = min(now, key=self.away.__getitem__), []
        while self.away[place]:
            chars, after = self.states[place]
            if chars is not None:
                out.append(_candidates(chars)[0])
                place = after[0]
            else:
                place = min(after, key=self.away.__getitem__)
        return "".join(out)

    def options(self, now: frozenset[int]) -> dict[str, None]:
        """Return at least one possible next character for each transition."""
        sets = dict.fromkeys(chars for chars, _ in (self.states[place] for place in now) if chars)
        return dict.fromkeys(char for chars in sets for char in _candidates(chars))

    def _distances(self) -> list[int]:
        """Return each state's distance in characters to the accepting state."""
        before: list[list[tuple[int, int]]] = [[] for _ in self.states]
        for place, (chars, after) in enumerate(self.states):
            for other in after if chars != () else ():
                before[other].append((place, 0 if chars is None else 1))
        away, waiting = [FAR] * len(self.states), [(0, 0)]
        while waiting:
            far, place = heappop(waiting)
            if far < away[place]:
                away[place] = far
                for other, cost in before[place]:
                    heappush(waiting, (far + cost, other))
        return away


class TextPattern(NamedTuple):
    """The conditions on a text: it matches all `patterns` and has at least `low` characters."""

    patterns: tuple[str, ...]
    low: int = 0

    @lru_cache(maxsize=1024)  # noqa: B019 (an instance holds only its two fields)
    def rest(self, beginning: str) -> str | None:
        """Return the shortest text that completes `beginning`, or None if none is found."""
        if len(beginning) > MAX_BEGINNING or self.low > MAX_LEAST:
            return None
        try:
            words = [pattern_automaton(pattern) for pattern in self.patterns]
        except UnsupportedRegex:
            return None
        low = max(0, self.low - len(beginning))
        now = []
        for each in words:
            at = each.start_at
            for char in beginning:
                at = each.advance(at, char)
                if not at:
                    return None
            now.append(at)
        if not words:
            return "a" * low
        if len(words) == 1 and words[0].distance(now[0]) >= low:
            return words[0].nearest(now[0]) if words[0].distance(now[0]) < FAR else None
        return _search(words, tuple(now), low)


def _search(words: list[PatternAutomaton], now: tuple[frozenset[int], ...], low: int) -> str | None:
    """Search with A* for the shortest text from the states `now`.

    Among equal estimates, longer texts are tried first.
    """

    def estimate(at: tuple[frozenset[int], ...], size: int) -> int:
        return max(low - size, *(each.distance(one) for each, one in zip(words, at)))

    waiting = [(estimate(now, 0), 0, 0, "", now)]
    seen, count = set(), 0
    alike = _representatives(words)
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
        for char in dict.fromkeys(alike[char] for char in words[0].options(at[0])):
            count += 1
            after = tuple(each.advance(one, char) for each, one in zip(words, at))
            if all(after) and after not in reached:
                reached.add(after)
                heappush(
                    waiting,
                    (len(text) + 1 + estimate(after, len(text) + 1), -len(text), count, text + char, after),
                )
    return None


def _representatives(words: list[PatternAutomaton]) -> dict[str, str]:
    """Map each relevant character to a representative.

    Two characters share a representative if no set in the patterns distinguishes them.
    """
    sets = list(dict.fromkeys(chars for each in words for chars, _ in each.states if chars))
    first: dict[tuple[bool, ...], str] = {}
    looked_at = dict.fromkeys(char for chars in sets for char in _candidates(chars))
    if len(sets) * len(looked_at) > MAX_TOLD_APART:
        return {char: char for char in looked_at}
    return {
        char: first.setdefault(tuple(contains(chars, ord(char)) for chars in sets), char)
        for char in looked_at
    }


@lru_cache(maxsize=1024)
def _candidates(chars: Set) -> str:
    """Return characters from a set, in order of preference."""
    plain = "".join(char for char in _PLAIN if contains(chars, ord(char)))
    return plain or "".join(chr(low) for low, _ in chars)


@lru_cache(maxsize=512)
def _cached_automaton(regex: str) -> PatternAutomaton | None:
    try:
        return PatternAutomaton(regex)
    except (UnsupportedRegex, RecursionError):
        return None


def pattern_automaton(regex: str) -> PatternAutomaton:
    found = _cached_automaton(regex)
    if found is None:
        raise UnsupportedRegex("has an unsupported part, or too many states")
    return found


def _with_fewer_states(node: Node) -> Node:
    match node:
        case Seq(items=items):
            return Seq(tuple(map(_with_fewer_states, items)))
        case Alt(options=options):
            return Alt(tuple(map(_with_fewer_states, options)))
        case Repeat(item=item, low=low, high=high):
            endless = high is not None and high - low > MAX_OPTIONAL
            return Repeat(_with_fewer_states(item), low, None if endless else high)
    return node
