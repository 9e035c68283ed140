"""Time measurements for the benchmark `structured`: grammar compilation, and masks for one row and for many
rows.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, process_time_ns
from typing import Any

import numpy as np

from benchmarks.structured.sides import Case, Refused, Rows, Side

STEPS = 20  # number of steps in each turn of `apart`
SLOW_NS = 200_000_000  # a slower compilation is measured only once

# Keyed by (side, case, kind); a side is a grammar library. Kind "compile": ns for the compilation. Kind
# "new": ns for each token, in a newly compiled grammar. Kind "known": ns for each token when the same answers
# are repeated. Kind "over": 0 if the library rejects an answer, otherwise absent.
Times = dict[tuple[str, str, str], Any]
Kept = dict[tuple[str, str], Any]  # the compiled grammar, keyed by (side, case)


def one_row(
    sides: Sequence[Side], cases: Sequence[Case], rounds: int, tick: Callable[[str], None]
) -> tuple[Times, Kept]:
    """Return each time's minimum over `rounds`, and the last compiled grammars. A refused schema has no
    times. A schema whose grammar rejects an answer has only "compile" and "over".
    """
    samples: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    kept: Kept = {}
    for side in sides:
        side.compile(cases[0])  # the first compilation also converts the vocabulary
    for number in range(rounds):
        gc.collect()
        for case in cases:
            for side in sides[:: -1 if number % 2 else 1]:
                at = (side.name, case.name)
                spent = samples[*at, "compile"]
                if not spent or spent[-1] <= SLOW_NS:
                    begin = process_time_ns()
                    try:
                        kept[at] = side.compile(case)
                    except Refused:
                        continue
                    spent.append(process_time_ns() - begin)
                for kind in ("new", "known"):
                    walked = [_walk(side.begin([kept[at]], [[]]), answer) for answer in case.answers]
                    if None in walked:
                        samples[*at, "over"].append(0)
                        break
                    samples[*at, kind].append([ns for times in walked for ns in times])
        tick(f"round {number + 1} of {rounds}")
    return {key: np.min(np.array(each), axis=0) for key, each in samples.items() if each}, kept


def _walk(rows: Rows, answer: list[int]) -> list[int] | None:
    """Return the time (ns) to fill the mask and to advance, for each token in `answer`. Return None if a mask
    forbids a token.
    """
    times = []
    for token in answer:
        begin = perf_counter_ns()
        rows.fill()
        filled = perf_counter_ns()
        if not rows.bits[0, token >> 5] >> (token & 31) & 1:
            return None
        ready = perf_counter_ns()
        rows.advance([token])
        times.append(filled - begin + perf_counter_ns() - ready)
    return times


@dataclass(slots=True)
class Together:
    """CPU times (ns) by side, with an entry for each step. `fill`: to fill all rows' masks. `advance`: to
    advance all rows.
    """

    fill: dict[str, list[int]]
    advance: dict[str, list[int]]

    @classmethod
    def of(cls, sides: Sequence[Side]) -> "Together":
        return cls({side.name: [] for side in sides}, {side.name: [] for side in sides})

    def step(self, rows: dict[str, Rows], tokens: list[int], backwards: bool) -> None:
        for name in list(rows)[:: -1 if backwards else 1]:
            each = rows[name]
            begin = process_time_ns()
            each.fill()
            filled = process_time_ns()
            each.advance(tokens)
            self.fill[name].append(filled - begin)
            self.advance[name].append(process_time_ns() - filled)

    def add(self, other: "Together") -> None:
        for name in self.fill:
            self.fill[name] += other.fill[name]
            self.advance[name] += other.advance[name]

    @classmethod
    def calmest(cls, rounds: Sequence["Together"]) -> "Together":
        """Return the minimum of each step over the rounds."""
        fill, advance = (
            {name: np.min([getattr(each, what)[name] for each in rounds], axis=0) for name in rounds[0].fill}
            for what in ("fill", "advance")
        )
        return cls(fill, advance)


def apart(sides: Sequence[Side], kept: Kept, cases: Sequence[Case], count: int, turns: int) -> Together:
    """Time STEPS steps for `count` rows at different positions in their answers, `turns` times. The grammars
    in `kept` have already processed these answers.
    """
    found = Together.of(sides)
    long = [(case, answer) for case in cases for answer in case.answers if len(answer) > STEPS]
    for turn in range(turns if long else 0):
        picks = [long[(row + turn) % len(long)] for row in range(count)]
        starts = [(row * 29 + turn * 7) % (len(answer) - STEPS) for row, (_, answer) in enumerate(picks)]
        said = [answer[:start] for (_, answer), start in zip(picks, starts, strict=True)]
        rows = {
            side.name: side.begin([kept[side.name, case.name] for case, _ in picks], said) for side in sides
        }
        for step in range(STEPS):
            tokens = [answer[start + step] for (_, answer), start in zip(picks, starts, strict=True)]
            found.step(rows, tokens, bool(step % 2))
    return found


def in_step(sides: Sequence[Side], case: Case, count: int, backwards: bool) -> Together:
    """Time `count` rows that generate the same answer in lockstep. The schema is newly compiled, so the
    library has no cached masks.
    """
    found = Together.of(sides)
    rows = {side.name: side.begin([side.compile(case)] * count, [[]] * count) for side in sides}
    for step, token in enumerate(case.answers[0]):
        found.step(rows, [token] * count, bool(step % 2) is backwards)
    return found
