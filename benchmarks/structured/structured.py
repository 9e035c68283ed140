"""Compare the cost of grammars (compilation and masks) with bare llguidance and bare xgrammar.

    python -m benchmarks structured [--vocabulary FILE] [--quick] [--json]

llguidance gets each schema twice: as mmengine normalizes it (called "our gate" in the tables), and as the
user wrote it. The schemas are in schemas.jsonl; the vocabulary has 150,000 tokens. The benchmark measures
compilation, a single row's mask for each token of an answer, and the masks of 64 rows together. In every
round, all libraries do the same work in turn; every second round has the reverse order. A reported time is
the minimum over the rounds. p50 and p99 are over schemas, tokens or steps.

    --vocabulary FILE  tekken_240911.json from the package mistral-common (default: from the installed
                       package), or a .gguf file
    --rounds N         rounds (default 7)
    --quick            one round, every fourth schema
    --json             print the targets as a last line of JSON
    --out FILE.md      file for the tables

Compilations and steps with 64 rows are measured in CPU time; a single row is measured in wall time.
Everything runs on one core. A row's masks are measured twice. In a grammar's first answer ("new"), the
library still builds its parser states. Then the same answer is repeated ("known").
"""

import argparse
import gc
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from benchmarks.common.measure import usable_cpus
from benchmarks.common.report import Table, Target, finish
from benchmarks.structured.clock import Kept, Times, Together, apart, in_step, one_row
from benchmarks.structured.sides import Case, Side, all_sides, xgrammar
from benchmarks.structured.vocabulary import find, load
from mmengine.structured_output.json_schema.normalization import normalize_schema

SCHEMAS = Path(__file__).with_name("schemas.jsonl")
NUM_ROWS = 64
ALLOWANCE = 1.1  # maximum ratio of our time to the bare library's
OURS, BARE = "mmengine", "llguidance"
MIXED = f"{NUM_ROWS} rows of many schemas, at different places"
ALIKE = f"{NUM_ROWS} rows of one schema, at different places"
SAME = f"{NUM_ROWS} rows of one schema, all at the same position for the first time"


def compile_table(sides: Sequence[Side], cases: Sequence[Case], times: Times) -> Table:
    table = Table("Compilation, ms of CPU time", ("", "p50", "p99", "refused", "does not allow an answer"))
    for side in sides:
        if side.name == "mmengine, following":
            continue  # compiles in the same way as the side "mmengine"
        spent = _of(times, side.name, "compile")
        refused = [case.name for case in cases if (side.name, case.name, "compile") not in times]
        over = [case.name for case in cases if (side.name, case.name, "over") in times]
        table.rows.append((side.name, *_ms(spent), str(len(refused)), ", ".join(over) or "none"))
    table.rows.append(("our gate, before", *_ms([_gate_ns(case) for case in cases]), "0", ""))
    table.notes.append(
        f"{len(cases)} schemas. The gate reads, checks and rewrites a schema in the caller's thread, once "
        "for each text; its output and the compiled grammar are cached."
    )
    return table


def _gate_ns(case: Case) -> int:
    begin = perf_counter_ns()
    normalize_schema(case.schema)
    return perf_counter_ns() - begin


def row_table(sides: Sequence[Side], times: Times) -> Table:
    columns = (
        "",
        *(f"{kind} {share}" for kind in ("new", "known") for share in ("p50", "p99", "max", "mean")),
    )
    table = Table("Masks of one row, µs a token", columns)
    for side in sides:
        cells = []
        for kind in ("new", "known"):
            spent = np.concatenate(_of(times, side.name, kind)) / 1e3
            cells += [f"{value:.1f}" for value in (*_shares(spent, 50, 99, 100), spent.mean())]
        table.rows.append((side.name, *cells))
    table.notes.append(
        "A token's time is its mask and the step to the next. Following, used for greedy and plainly sampled "
        "rows on a CPU, only checks whether the token is allowed."
    )
    return table


def schema_table(sides: Sequence[Side], cases: Sequence[Case], times: Times) -> Table:
    """Return a table with compilation times (ms) and median mask times (µs) for each schema and side."""
    table = Table("Every schema: compilation, ms / masks of one row in a new grammar, p50 µs", ("",))
    table.columns = ("", "tokens", *(side.name for side in sides))
    for case in cases:
        cells = [str(sum(map(len, case.answers)))]
        for side in sides:
            spent, masks = (times.get((side.name, case.name, kind)) for kind in ("compile", "new"))
            mask = "-" if masks is None else f"{np.median(masks) / 1e3:.1f}"
            cells.append("refused" if spent is None else f"{spent / 1e6:.2f} / {mask}")
        table.rows.append((case.name, *cells))
    return table


def rows_table(title: str, found: Together) -> Table:
    columns = ("", *(f"{what} {share}" for what in ("masks", "step") for share in ("p50", "p99", "max")))
    table = Table(f"{title}: ms for all", columns)
    for name, spent in found.fill.items():
        cells = [f"{value / 1e6:.2f}" for each in (spent, found.advance[name]) for value in _shares(each)]
        table.rows.append((name, *cells))
    return table


def targets_of(times: Times, together: dict[str, Together]) -> list[Target]:
    found = []
    for share in (50, 99):
        ours, bare = (_shares(_of(times, name, "compile"), share)[0] for name in (OURS, BARE))
        found.append(
            Target(f"compilation p{share}, ours / bare llguidance", ours / bare, ALLOWANCE, most=True)
        )
    for kind in ("new", "known"):
        for share in (50, 99):
            ours, bare = (_shares(np.concatenate(_of(times, name, kind)), share)[0] for name in (OURS, BARE))
            name = f"mask of one row p{share}, {kind} grammar, ours / bare llguidance"
            found.append(Target(name, ours / bare, ALLOWANCE, most=True))
    for title, each in together.items():
        for share in (50, 99):
            ours, bare = (_shares(_sums(each, name), share)[0] for name in (OURS, BARE))
            found.append(
                Target(f"{title}, p{share}, ours / bare llguidance", ours / bare, ALLOWANCE, most=True)
            )
    for title, each in together.items():
        half = _shares(each.fill[OURS], 50)[0] / 1e6
        found.append(Target(f"{title}, masks p50, ms", half, 1.0, most=True))
    return found


def _sums(found: Together, name: str) -> np.ndarray:
    return np.array(found.fill[name]) + np.array(found.advance[name])


def _of(times: Times, side: str, kind: str) -> list:
    return [spent for (name, _, what), spent in times.items() if name == side and what == kind]


def _shares(values: Iterable[float], *shares: int) -> list[float]:
    return np.percentile(np.array(values), shares or (50, 99, 100), method="inverted_cdf").tolist()


def _ms(spent: Iterable[float]) -> list[str]:
    return [f"{value / 1e6:.2f}" for value in _shares(spent, 50, 99)]


def run(options: argparse.Namespace) -> tuple[list[Table], list[Target]]:
    vocabulary = load(find(options.vocabulary))
    lines = SCHEMAS.read_text(encoding="utf-8").splitlines()
    cases = [Case.of(line, vocabulary) for line in (lines[::4] if options.quick else lines)]
    sides = all_sides(vocabulary)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        rounds = 1 if options.quick else options.rounds
        times, kept = one_row(sides, cases, rounds, _tick)
        taking = [case for case in cases if all((side.name, case.name, "new") in times for side in sides)]
        together = _together(sides, kept, taking, rounds)
    finally:
        gc.enable()
        gc.unfreeze()
    tables = [
        compile_table(sides, cases, times),
        row_table(sides, times),
        *(rows_table(title, found) for title, found in together.items()),
        schema_table(sides, cases, times),
    ]
    return tables, targets_of(times, together)


def _together(sides: Sequence[Side], kept: Kept, cases: Sequence[Case], rounds: int) -> dict[str, Together]:
    """Time 64 rows in three batches: with many schemas, with a single schema, and with a single schema in
    lockstep.
    """
    fair = [side for side in sides if side.name in (OURS, BARE)]
    found: dict[str, list[Together]] = {MIXED: [], ALIKE: [], SAME: []}
    for number in range(rounds):
        found[MIXED].append(apart(sides, kept, cases, NUM_ROWS, turns=8))
        alike, same = Together.of(sides), Together.of(fair)
        for case in cases:
            alike.add(apart(sides, kept, [case], NUM_ROWS, turns=1))
            same.add(in_step(fair, case, NUM_ROWS, bool(number % 2)))
        found[ALIKE].append(alike)
        found[SAME].append(same)
        _tick(f"{NUM_ROWS} rows, round {number + 1} of {rounds}")
    return {title: Together.calmest(each) for title, each in found.items()}


def _tick(text: str) -> None:
    print(text, end="\x1b[K\r", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=Path, help="tekken_240911.json, or a .gguf file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round, every fourth schema")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    if cpus := usable_cpus():
        os.sched_setaffinity(0, cpus[-1:])
    tables, targets = run(options)
    names = ("llguidance", *(("xgrammar",) if xgrammar is not None else ()))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    facts = [versions]
    if xgrammar is None:
        facts.append("xgrammar is left out, since it is not installed: pip install xgrammar")
    finish("Cost of a grammar", tables, targets, options, facts)


if __name__ == "__main__":
    main()
