"""Combines regex patterns, for example into a pattern for strings that match one pattern but not another.

Each pattern becomes a deterministic automaton: from every state, every character leads to exactly one state.
Automata are combined and minimized. The result is written as a pattern by eliminating one state after another
(J. Brzozowski, E. McCluskey, Signal Flow Graph Techniques for Sequential Circuit State Diagrams, 1963).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from mmengine.structured_output.json_schema.patterns.character_sets import (
    PatternError,
    check_alternatives,
    without_nul,
    write_class,
)
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.regex.automaton import Automaton
from mmengine.structured_output.regex.sets import LAST, Ranges

MAX_STATES = 256  # Maximum number of states in an automaton.
TABLE_COST = 8  # Number of table entries that count as a matching step.
MAX_CHARS = 20_000  # Maximum length of a written pattern.


@dataclass(frozen=True, slots=True)
class Language:
    """A set of texts (a formal language), as a deterministic automaton over character ranges.

    `cuts` has code point ranges, without surrogates. The automaton does not distinguish between characters in
    one range. `steps[state][cut]` is the state to which characters in this range lead. State 0 is the start
    state. `ends` has the accepting states.
    """

    cuts: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, ...], ...]
    ends: frozenset[int]

    def is_empty(self) -> bool:
        return not self.ends


def build_languages(regexes: list[str], budget: MatchBudget) -> list[Language]:
    r"""Return an automaton for each pattern. All these automata have equal `cuts`, so that they can be
    combined.

    Raises PatternError if the construction exceeds the budget, or if a pattern has \p.
    """
    machines = [budget.machine(regex) for regex in regexes]
    cuts = _cuts(machines)
    return [_determinize(machine, cuts, budget) for machine in machines]


def _cuts(machines: list[Automaton]) -> tuple[tuple[int, int], ...]:
    points = {0, 0xD800, 0xE000, LAST + 1}
    for machine in machines:
        points |= {point for one in machine.sets() for low, high in one for point in (low, high + 1)}
    bounds = sorted(points)
    return tuple((low, after - 1) for low, after in pairwise(bounds) if not 0xD800 <= low < 0xE000)


def has_overlap(a: str, b: str, budget: MatchBudget) -> bool:
    """Return whether some text matches both patterns.

    The check is fast if the patterns begin differently.
    """
    machines = [budget.machine(a), budget.machine(b)]
    cuts = _cuts(machines)
    states = {tuple(machine.first() for machine in machines): 0}
    for state in _iterate_growing(states):
        if all(machine.accepts(now) for machine, now in zip(machines, state)):
            return True
        budget.spend(len(cuts) * (len(state[0]) + len(state[1]) + 1))
        for low, _ in cuts:
            to = tuple(machine.advance(now, chr(low)) for machine, now in zip(machines, state))
            if all(to):
                states.setdefault(to, len(states))
    return False


def membership_patterns(parts: list[Language], budget: MatchBudget) -> list[tuple[bool, ...]]:
    """Return the combinations of languages that occur for some text.

    A combination has a flag for each language: whether the language contains the text. The combination
    without any language is left out. Raises PatternError if the budget is exceeded.
    """
    states = {tuple(0 for _ in parts): 0}
    found: dict[tuple[bool, ...], None] = {}
    for state in _iterate_growing(states):
        found[tuple(place in part.ends for place, part in zip(state, parts))] = None
        budget.spend(len(parts[0].cuts) * len(parts) // TABLE_COST)
        for cut in range(len(parts[0].cuts)):
            states.setdefault(tuple(part.steps[place][cut] for place, part in zip(state, parts)), len(states))
    return [kind for kind in found if any(kind)]


def combine(parts: list[Language], holds: Callable[[list[bool]], bool], budget: MatchBudget) -> Language:
    """Return the language with all texts for which `holds` returns True.

    `holds` receives a flag for each language: whether the language contains the text. Raises PatternError if
    the budget is exceeded.
    """
    states = {tuple(0 for _ in parts): 0}
    steps: list[tuple[int, ...]] = []
    ends = set()
    for state in _iterate_growing(states):
        if holds([place in part.ends for place, part in zip(state, parts)]):
            ends.add(states[state])
        budget.spend(len(parts[0].cuts) * len(parts) // TABLE_COST)
        row = []
        for cut in range(len(parts[0].cuts)):
            to = tuple(part.steps[place][cut] for place, part in zip(state, parts))
            row.append(states.setdefault(to, len(states)))
        steps.append(tuple(row))
    return _minimize(Language(parts[0].cuts, tuple(steps), frozenset(ends)), budget)


def _iterate_growing(states: dict) -> Iterator:
    """Iterate over a dict's keys, including keys that are added during the iteration.

    Raises PatternError if the dict has more than MAX_STATES keys.
    """
    done = 0
    while done < len(states):
        if len(states) > MAX_STATES:
            raise PatternError(f"together the key patterns have more than {MAX_STATES} states")
        for state in list(states)[done:]:
            done += 1
            yield state


def _determinize(machine: Automaton, cuts: tuple[tuple[int, int], ...], budget: MatchBudget) -> Language:
    states = {machine.first(): 0}
    steps, ends = [], set()
    for state in _iterate_growing(states):
        if machine.accepts(state):
            ends.add(states[state])
        budget.spend(len(cuts) * (len(state) + 1))
        row = []
        for low, _ in cuts:
            to = machine.advance(state, chr(low))
            row.append(states.setdefault(to, len(states)))
        steps.append(tuple(row))
    return _minimize(Language(cuts, tuple(steps), frozenset(ends)), budget)


def _minimize(language: Language, budget: MatchBudget) -> Language:
    """Merge states that accept equal sets of texts (E. Moore, Gedanken-Experiments, 1956)."""
    groups = [int(state in language.ends) for state in range(len(language.steps))]
    while True:
        budget.spend(len(language.steps) * len(language.cuts) // TABLE_COST)
        found: dict[tuple[int, ...], int] = {}
        after = [
            found.setdefault((groups[state], *(groups[to] for to in row)), len(found))
            for state, row in enumerate(language.steps)
        ]
        if len(found) == len(set(groups)):
            break
        groups = after
    # State 0 is in the first group, so it stays state 0.
    rows = {groups[state]: tuple(groups[to] for to in row) for state, row in enumerate(language.steps)}
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    steps = tuple(tuple(numbers[to] for to in rows[group]) for group in numbers)
    return Language(language.cuts, steps, frozenset(numbers[groups[state]] for state in language.ends))


def write_pattern(language: Language) -> str:
    """Return a pattern, without anchors, whose full matches are exactly the language's texts.

    The language must not be empty.
    """
    edges = _edges(language)
    first, last = -1, -2
    edges[first] = {0: ""}
    for state in language.ends:
        edges[state][last] = ""
    inner = [state for state in edges if state >= 0]
    while inner:
        if sum(len(text) for row in edges.values() for text in row.values()) > 4 * MAX_CHARS:
            raise PatternError(f"the combined pattern has more than {MAX_CHARS:,} characters")
        costs = _costs(edges, inner)
        state = min(reversed(inner), key=costs.__getitem__)
        inner.remove(state)
        row = edges.pop(state)
        loop = row.pop(state, None)
        again = f"(?:{loop})*" if loop else ""
        for other in edges.values():
            if state in other:
                before = other.pop(state)
                for to, behind in row.items():
                    way = _in_group(before) + again + _in_group(behind)
                    other[to] = f"{other[to]}|{way}" if to in other else way
                    if len(other[to]) > MAX_CHARS:
                        raise PatternError(f"the combined pattern has more than {MAX_CHARS:,} characters")
    return edges[first][last]


def _costs(edges: dict[int, dict[int, str]], inner: list[int]) -> dict[int, int]:
    """Return, for each state, how many characters its elimination would duplicate.

    To eliminate a state, each path into the state is joined to each path out of the state.
    """
    # State -> number of paths into the state, and their total length.
    ways, sizes = dict.fromkeys(inner, 0), dict.fromkeys(inner, 0)
    for state, row in edges.items():
        for to, text in row.items():
            if to in ways and to != state:
                ways[to] += 1
                sizes[to] += len(text)
    out = {}
    for state in inner:
        outer = [len(text) for to, text in edges[state].items() if to != state]
        loop = len(edges[state].get(state, ""))
        out[state] = (
            sizes[state] * max(len(outer) - 1, 0)
            + sum(outer) * max(ways[state] - 1, 0)
            + loop * max(ways[state] * len(outer) - 1, 0)
        )
    return out


def _in_group(regex: str) -> str:
    return f"(?:{regex})" if "|" in regex else regex


def _edges(language: Language) -> dict[int, dict[int, str]]:
    """Return {state: {next state: character set as a regex}}.

    States from which no accepting state can be reached are left out.
    """
    useful = set(language.ends)
    while more := {
        state for state, row in enumerate(language.steps) if state not in useful and useful & set(row)
    }:
        useful |= more
    out: dict[int, dict[int, str]] = {}
    sets: list[Ranges] = []
    for state in sorted(useful):
        ranges: dict[int, Ranges] = {}
        for (low, high), to in zip(language.cuts, language.steps[state]):
            if to not in useful:
                continue
            found = ranges.setdefault(to, [])
            if found and found[-1][1] == low - 1:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
        sets += map(without_nul, ranges.values())
        out[state] = {to: write_class(found) for to, found in ranges.items()}
    check_alternatives(sets)
    return out
