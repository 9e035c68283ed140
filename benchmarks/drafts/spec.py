"""Measure the benefit and the cost of drafts on the included checkpoint.

    python -m benchmarks spec

Each cell is a task, a number of concurrent requests, and a drafter. Each cell is compared with an engine
without drafts. The tasks:

    schema    describe a synthetic picture as JSON, with a schema for the answer
    json      describe a synthetic picture as JSON, without a schema
    describe  describe a synthetic picture in words
    short     a question about a synthetic picture, answered in a sentence
    text      stories, facts to look up, counting: no picture

With "auto" and "K chosen", draft_policy goodput decides how many drafts are verified. With the other
drafters, all drafts are verified.

In the "idle" cells, the engine loads drafters, but no step may draft. The baseline engine has no drafters.
These cells measure the cost of loaded drafters, but not the time for deciding how much to draft.

Decoding is greedy, in float32, on one thread. Every round generates new pictures and texts, because some
drafters search past answers. Times are the process's CPU times up to the last token: "decoding" begins after
the prefill, "whole" with the first submit. A result is the median of the rounds' speedups, with its
bootstrapped 95 % interval. A target is missed if the upper end of the interval is below the target. "length"
is the mean number of accepted drafts per row and pass; "with bonus" adds the token that is sampled after the
drafts. "equal" counts answers with the same tokens as without drafts.

    --batch 1,4    concurrent requests (default: 1, 4, 16 and 64)
    --tasks LIST   some of the tasks above, separated by commas
    --drafters L   some of the drafters in the table
    --rounds N     rounds per cell (default 9)
    --asleep       only the "idle" cells
    --awake        only the other cells, without counting prefix cache hits
    --quick        3 rounds, batch 1 and 16, fewer drafters
    --json         print the targets as a last line of JSON
    --out FILE.md  file for the tables
"""

import argparse
import gc
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.measure import use_threads

use_threads(1)  # before torch is loaded

from benchmarks.common.repeat import interval  # noqa: E402
from benchmarks.common.report import Table, Target, finish  # noqa: E402
from benchmarks.drafts.spec_runs import DESCRIBE, JSON, NONE, SCHEMA, TASKS, Pairs, Side, ask, paired  # noqa: E402

AUTO, AUTO_ALL, HEAD, CHOSEN = "auto", "auto all", "eagle3 K=4", "eagle3 K chosen"
FIXED = {"draft_policy": "all"}  # every draft is verified
DRAFTERS = {
    **{name: {"spec": name, **FIXED} for name in ("grammar", "ngram", "suffix")},
    **{f"eagle3 K={most}": {"spec": "eagle3", "num_draft_tokens": most, **FIXED} for most in (1, 2, 4, 7)},
    CHOSEN: {"spec": "eagle3", "num_draft_tokens": 7, "draft_policy": "goodput"},
    AUTO: {"spec": AUTO},
    AUTO_ALL: {"spec": AUTO, **FIXED},
}
IDLE = {f"{name}, idle": {"spec": name, **FIXED} for name in ("eagle3", AUTO)}
NEVER_BELOW = 0.98  # minimum speed relative to no drafts, where the engine chooses how much to draft
CHEAP = 0.99  # minimum relative speed where nothing is drafted
COLUMNS = ("", "decoding", "95 %", "whole", "length", "with bonus", "equal")


@dataclass(frozen=True, slots=True)
class Cell:
    task: str
    batch: int
    drafter: str

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.task}, batch {self.batch}"


Cells = dict[Cell, Pairs]


def cells_of(options: argparse.Namespace) -> Cells:
    found: Cells = {}
    if not options.asleep:
        sides = [Side(name, **DRAFTERS[name]) for name in options.drafters]
        found = _beside(Side(NONE, spec=NONE), sides, options)
    if options.awake:
        return found
    idle = [Side(name, asks=False, **settings) for name, settings in IDLE.items()]
    return found | _beside(Side(NONE, asks=False, spec=NONE), idle, options)


def _beside(plain: Side, sides: list[Side], options: argparse.Namespace) -> Cells:
    """Compare `sides` with `plain` for each task and batch size, then close the engines."""
    found: Cells = {}
    gc.freeze()  # spec_runs.py's gc.collect then skips permanent objects
    for task in options.tasks:
        for batch in options.batch:
            tick = _Ticks(f"{task}, batch {batch}")
            pairs = paired(plain, sides, task, batch, options.rounds, random.Random(f"{task} {batch}"), tick)
            found |= {Cell(task, batch, name): each for name, each in pairs.items()}
    for side in (plain, *sides):
        side.close()
    gc.unfreeze()
    return found


class _Ticks:
    def __init__(self, text: str):
        self._text, self._number = text, 0

    def __call__(self) -> None:
        print(f"{self._text}, round {self._number}", end="\x1b[K\r", file=sys.stderr, flush=True)
        self._number += 1


def tables_of(cells: Cells) -> list[Table]:
    """Return one table for each task and batch size."""
    tables: dict[tuple[str, int], Table] = {}
    for cell, pairs in cells.items():
        title = f"{cell.task}, batch {cell.batch}: times as fast as without drafts"
        table = tables.setdefault((cell.task, cell.batch), Table(title, COLUMNS))
        mid, low, high = interval(pairs.ratios())
        equal, num_answers = pairs.equal()
        table.rows.append(
            (
                cell.drafter,
                f"{mid:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{interval(pairs.ratios('whole_ns'))[0]:.3f}",
                f"{pairs.length - 1:.2f}",
                f"{pairs.length:.2f}",
                f"{equal} of {num_answers}",
            )
        )
    return list(tables.values())


def targets_of(cells: Cells) -> list[Target]:
    """Return the targets of the measured cells. The values for speed are the upper ends of the intervals."""
    found = [
        Target(f"tokens a pass, {cell.name}", cells[cell].length, bar)
        for cell, bar in (
            (Cell(JSON, 1, HEAD), 3.5),
            (Cell(DESCRIBE, 1, HEAD), 2.5),
            (Cell(SCHEMA, 1, AUTO), 5.0),
        )
        if cell in cells
    ]
    for task in (SCHEMA, JSON):
        cell = Cell(task, 1, AUTO)
        if cell in cells:
            found.append(Target(f"upper end, {cell.name}", _upper(cells[cell]), 1.6))
    asked = [cell for cell in cells if cell.drafter not in IDLE]
    free = {cell: _upper(cells[cell]) for cell in asked if (cell.task, cell.batch) == (DESCRIBE, 1)}
    if free:
        best = max(free, key=free.get)
        found.append(Target(f"upper end, the best drafter ({best.name})", free[best], 1.3))
    for cell, pairs in cells.items():
        if cell.drafter in (AUTO, CHOSEN):
            found.append(Target(f"upper end, {cell.name}", _upper(pairs), NEVER_BELOW))
        elif cell.drafter in IDLE:
            found.append(Target(f"upper end, {cell.name}", _upper(pairs), CHEAP))
        elif cell.drafter == "grammar" and cell.task == DESCRIBE:
            name = f"upper end, nothing to draft ({cell.name})"
            found.append(Target(name, _upper(pairs), CHEAP))
    counts = [pairs.equal() for pairs in cells.values()]
    equal, num_answers = (sum(column) for column in zip(*counts, strict=True))
    found.append(Target("answers with the same tokens as without drafts", equal / num_answers, 1.0))
    return found


def _upper(pairs: Pairs) -> float:
    return interval(pairs.ratios())[2]


def prefix_hits(rounds: int) -> tuple[Table, list[Target]]:
    """Count the prompt tokens found in the prefix cache while 8 requests repeat, with and without drafts."""
    table = Table("Prefix cache", ("", "tokens found", "share of those found without drafts"))
    found, targets = {}, []
    for name, settings in ((NONE, {"spec": NONE}), (HEAD, DRAFTERS[HEAD]), (AUTO, DRAFTERS[AUTO])):
        rng, side = random.Random(5), Side(name, enable_prefix_caching=True, **settings)
        asks = [ask(side.engine.processor, rng, task) for task in (DESCRIBE, JSON) for _ in range(4)]
        found[name] = sum(side.run(DESCRIBE, [asks]).cached for _ in range(rounds + 1))
        share = found[name] / found[NONE]
        table.rows.append((name, str(found[name]), f"{share:.3f}"))
        targets.append(Target(f"prefix cache, tokens found with {name} / without", share, 1.0))
        side.close()
    return table, targets[1:]


def run(options: argparse.Namespace) -> tuple[list[Table], list[Target]]:
    cells = cells_of(options)
    if options.asleep or options.awake:
        return tables_of(cells), targets_of(cells)
    hits, hit_targets = prefix_hits(options.rounds)
    return [*tables_of(cells), hits], [*targets_of(cells), *hit_targets]


def _names(known: Mapping[str, object] | Sequence[str]):
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batch", type=_sizes, default=[1, 4, 16, 64], help="batch sizes, separated by commas"
    )
    parser.add_argument("--tasks", type=_names(TASKS), default=list(TASKS))
    parser.add_argument("--drafters", type=_names(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--asleep", action="store_true", help="only the idle cells")
    parser.add_argument("--awake", action="store_true", help="only cells in which drafts are granted")
    parser.add_argument("--quick", action="store_true", help="3 rounds, batch 1 and 16, fewer drafters")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batch = 3, [1, 16]
        options.drafters = ["ngram", "suffix", HEAD, CHOSEN, AUTO]
    tables, targets = run(options)
    finish("Drafts, embedded checkpoint", tables, targets, options)


if __name__ == "__main__":
    main()
