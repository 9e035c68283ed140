"""Patterns for the strings that another pattern does not match.

The states of a pattern are made deterministic, what ends in none of its ends is what it does not match, and
that is written as a pattern again, one state after another taken out (S. Kleene 1956; Brzozowski and
McCluskey 1963). Which may become long: both the states and the text are bounded.
"""

from collections.abc import Collection
from functools import lru_cache

from mmengine.structured_output.json_schema.characters import PatternError, char_class
from mmengine.structured_output.json_schema.keys import all_but
from mmengine.structured_output.json_schema.matching import Budget
from mmengine.structured_output.json_schema.pattern import Pattern
from mmengine.structured_output.regex.sets import LAST, Ranges, Set, holds
from mmengine.structured_output.regex.states import States

MAX_STATES = 96  # of a pattern made deterministic
MAX_TEXT = 8_000  # characters of the pattern that is written
MAX_STEPS = 100_000  # of making it

Table = list[dict[int, int]]  # by state and class of characters, the next state; the first is the start


def without_values(values: tuple[str, ...]) -> Pattern:
    """Every string but these."""
    return Pattern(all_but(list(values)), None)


def opposite(regex: str) -> Pattern:
    """Every string that `regex`, as pattern.py writes it, does not match as a whole.

    Strings with U+0000 are left out: sets of a pattern may have given it up (characters.py). PatternError
    says why there is none.
    """
    found = _opposite(regex)
    if isinstance(found, PatternError):
        raise found
    return found


@lru_cache(maxsize=256)
def _opposite(regex: str) -> Pattern | PatternError:
    """Kept where it fails too, as many alternatives may ask for it and failing is what takes longest."""
    try:
        return _worked_out(regex)
    except PatternError as error:
        return error


def _worked_out(regex: str) -> Pattern:
    if "\\p" in regex or "\\P" in regex:
        raise PatternError("what a pattern with \\p does not match is not worked out")
    machine = Budget(MAX_STEPS).machine(regex)
    classes = _classes(machine.sets())
    table, ends = _deterministic(machine, classes)
    table, ends = _smallest(table, ends)
    text = _text(table, {at for at in range(len(table)) if at not in ends}, [r for r, _ in classes])
    return Pattern(text or "[^\\x00-\\U0010FFFF]", None)


@lru_cache(maxsize=1024)
def meet(a: str, b: str) -> bool:
    """Whether some string may match both patterns; False is proved."""
    if any(mark in regex for mark in ("\\p", "\\P") for regex in (a, b)):
        return True
    try:
        machines = [Budget(MAX_STEPS).machine(regex) for regex in (a, b)]
        tokens = {each for machine in machines for each in machine.sets()}
        # A set that holds U+0001 may have given up U+0000 (characters.py), so it is taken to hold both.
        zero = frozenset(ranges for ranges in tokens if any(low <= 1 for low, _ in ranges))
        classes = [key for _, key in _classes(tokens)] + [zero]
        first = tuple(machine.first() for machine in machines)
        waiting, seen = [first], {first}
        while waiting:
            now = waiting.pop()
            if all(0 in states for states in now):
                return True
            for key in classes:
                after = tuple(_after(*each, key) for each in zip(machines, now, strict=True))
                if all(after) and after not in seen:
                    seen.add(after)
                    waiting.append(after)
    except PatternError:
        return True
    return False


def _after(machine: States, now: frozenset[int], tokens: frozenset[Set]) -> frozenset[int]:
    """The states behind one character, which these tokens match."""
    steps = (machine.states[place] for place in now)
    return machine.reached([to[0] for chars, to in steps if chars in tokens])


def _classes(tokens: Collection[Set]) -> list[tuple[Ranges, frozenset[Set]]]:
    """Sets of characters that no token tells apart, and the tokens that match them; without U+0000."""
    edges = {1, 0xD800, 0xE000, LAST + 1}
    edges |= {edge for ranges in tokens for low, high in ranges for edge in (low, high + 1)}
    points = sorted(edge for edge in edges if edge > 0)
    if len(points) * len(tokens) > MAX_STEPS:
        raise PatternError("a pattern has too many sets of characters")
    found: dict[frozenset[Set], Ranges] = {}
    for low, after in zip(points, points[1:], strict=False):
        if not 0xD800 <= low < 0xE000 and low <= LAST:
            key = frozenset(ranges for ranges in tokens if holds(ranges, low))
            found.setdefault(key, []).append((low, after - 1))
    return [(ranges, key) for key, ranges in found.items()]


def _deterministic(machine: States, classes: list[tuple[Ranges, frozenset[Set]]]) -> tuple[Table, set[int]]:
    states = [machine.first()]
    known = {states[0]: 0}
    table: Table = []
    for now in states:  # which grows
        row = {}
        for at, (_, tokens) in enumerate(classes):
            after = _after(machine, now, tokens)
            if after not in known:
                if len(states) >= MAX_STATES:
                    raise PatternError("what a pattern does not match is too much to write down")
                known[after] = len(states)
                states.append(after)
            row[at] = known[after]
        table.append(row)
    return table, {at for at, state in enumerate(states) if 0 in state}


def _smallest(table: Table, ends: set[int]) -> tuple[Table, set[int]]:
    """States that nothing tells apart become one (E. Moore 1956)."""
    block = [int(at in ends) for at in range(len(table))]
    while True:
        keys = [(block[at], *(block[to] for to in row.values())) for at, row in enumerate(table)]
        names = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        now = [names[key] for key in keys]
        if len(names) == len(set(block)):
            break
        block = now
    first = {name: at for at, name in reversed(list(enumerate(now)))}
    small = [{at: now[to] for at, to in table[first[name]].items()} for name in range(len(names))]
    return small, {now[at] for at in ends}


def _text(table: Table, ends: set[int], sets: list[Ranges]) -> str:
    """The pattern of what leads from the first state to one of `ends`; "" when nothing does."""
    start, end = -1, -2
    edges: dict[tuple[int, int], str] = {(start, 0): ""} | {(at, end): "" for at in ends}
    for at, row in enumerate(table):
        for to in set(row.values()):
            ranges = _joined([each for place, other in row.items() if other == to for each in sets[place]])
            edges[at, to] = char_class(ranges)
    left = set(range(len(table)))
    while left:
        at = min(left, key=lambda one: _cost(edges, one))
        left.remove(at)
        loop = edges.pop((at, at), None)
        around = f"{_group(loop)}*" if loop else ""
        before = [(a, edges.pop((a, b))) for a, b in list(edges) if b == at]
        behind = [(b, edges.pop((a, b))) for a, b in list(edges) if a == at]
        for a, head in before:
            for b, tail in behind:
                way = _sequence(head, around, tail)
                known = edges.get((a, b))
                edges[a, b] = way if known is None else _either(known, way)
        if sum(map(len, edges.values())) > MAX_TEXT * 4:
            raise PatternError("what a pattern does not match is too much to write down")
    text = edges.get((start, end))
    if text is not None and len(text) > MAX_TEXT:
        raise PatternError("what a pattern does not match is too much to write down")
    return "" if text is None else text or "(?:)"


def _cost(edges: dict[tuple[int, int], str], at: int) -> int:
    ins = [len(text) for (a, b), text in edges.items() if b == at and a != at]
    outs = [len(text) for (a, b), text in edges.items() if a == at and b != at]
    loop = len(edges.get((at, at), ""))
    return (
        sum(ins) * max(len(outs) - 1, 0)
        + sum(outs) * max(len(ins) - 1, 0)
        + loop * max(len(ins) * len(outs) - 1, 0)
    )


def _joined(ranges: Ranges) -> Ranges:
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and out[-1][1] + 1 == low:
            out[-1] = (out[-1][0], high)
        else:
            out.append((low, high))
    return out


def _group(text: str) -> str:
    whole = text.startswith("[") and text.find("]") == len(text) - 1 and "\\]" not in text
    return text if whole else f"(?:{text})"


def _sequence(*parts: str) -> str:
    return "".join(_group(part) if "|" in part else part for part in parts)


def _either(a: str, b: str) -> str:
    return f"{a or '(?:)'}|{b or '(?:)'}"
