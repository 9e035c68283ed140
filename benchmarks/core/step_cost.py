"""Measures a step's cost without the model, and compares it with a bare Python loop.

    python -m benchmarks step_cost [--quick] [--json]

Costs are CPU times of one thread, with the garbage collector frozen and the log on disk. The executor runs no
model, and its time is subtracted. For each row, the bare loop increments two integers and appends a token.
Each case runs in three rounds (one with --quick). The table shows the round with the smallest median.

    --rows 16,64   numbers of rows (default: 16 to 4,096)
    --trace FILE   also run 2,000 requests of a ServeGen trace with 256 rows
    --long         measure memory over a million steps (default: 200,000)
    --out FILE.md  file for the table
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.core.step_cost_engine import (
    Shape,
    bare_loop,
    boundary,
    decode,
    memory,
    percentile,
    steady,
    storm,
    trace,
)

SIZES = (16, 64, 256, 1024, 4096)
OVERLAPPED = (16, 256, 1024)
WITH_SLOTS = "decode, state slots"
PHASES = ("schedule", "evolve", "append", "batch", "complete")


class Table:
    """Rows of a Markdown table, with targets and whether they are met."""

    def __init__(self) -> None:
        self.lines = [
            "| case | rows | " + " | ".join(f"{name} µs" for name in (*PHASES, "core", "whole step"))
            + " | bare loop | core / bare | whole / bare |",
            "|---|---|" + "---|" * 10,
        ]  # fmt: skip
        self.facts: list[str] = []
        self.targets: dict[str, dict[str, float | bool]] = {}

    def add(self, case: str, rows: int, times: dict[str, list[int]], bare: int) -> None:
        """Add a row. `times`: phase -> each step's ns. Each cell is p50 / p99."""
        cells = [f"{_us(times[name], 50)} / {_us(times[name], 99)}" for name in (*PHASES, "core", "whole")]
        ratios = [f"{percentile(times[name], 50) / bare:.1f}" for name in ("core", "whole")]
        self.lines.append(
            f"| {case} | {rows} | {' | '.join(cells)} | {bare / 1000:.0f} | {' | '.join(ratios)} |"
        )

    def target(self, name: str, measured: float, bar: float) -> None:
        self.targets[name] = {"measured": round(measured, 2), "bar": bar, "met": bool(measured <= bar)}

    def text(self) -> str:
        marks = [
            f"| {name} | {each['measured']} | {each['bar']} | {'yes' if each['met'] else 'no'} |"
            for name, each in self.targets.items()
        ]
        head = ["", "| target | measured | at most | met |", "|---|---|---|---|"]
        notes = [
            "p50 / p99 of thread CPU time in the calmest round. core: schedule, evolve, append with commit, "
            "complete.",
            "",
        ]
        return "\n".join(notes + self.lines + head + marks + [""] + self.facts) + "\n"


def _us(times: Iterable[int], share: int) -> str:
    value = percentile(times, share) / 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def measure(table: Table, folder: Path, args: argparse.Namespace) -> None:
    steps, rounds = (300, 1) if args.quick else (1500, 3)
    for rows in args.rows:
        cases, bare = _calmest(rounds, rows, partial(_cases, rows, folder, steps))
        for name, times in cases.items():
            table.add(name, rows, times, bare)
        if rows == 16:
            table.target("whole step at 16 rows, µs", _p50(cases["decode"]) / 1000, 100)
        if rows == 1024:
            _targets(table, cases, bare)
    cases, bare = _calmest(rounds, 256, partial(_busy_cases, folder, steps))
    for name, times in cases.items():
        table.add(name, 256, times, bare)


def _cases(rows: int, folder: Path, steps: int) -> dict[str, dict]:
    """Return {case: {phase: each step's ns}} for rows that decode."""
    count = steps if rows < 4096 else steps // 3
    cases = {"decode": decode(Shape(rows), folder, count)}
    if rows in OVERLAPPED:
        cases["decode, two in flight"] = decode(Shape(rows, max_in_flight=2), folder, count)
        cases[WITH_SLOTS] = decode(Shape(rows, slots=True), folder, count)
    cases["decode, 3 drafts"] = decode(Shape(rows, num_drafts=3), folder, count)
    return cases | boundary(rows, folder, max(6, count // 100))


def _busy_cases(folder: Path, steps: int) -> dict[str, dict]:
    cases = {"decode and prefill": decode(Shape(256, prefill=True), folder, steps)}
    for mode in ("recompute", "swap"):
        cases[f"preemption storm, {mode}"] = storm(256, mode, folder, steps)
    return cases


def _calmest(rounds: int, rows: int, run: Callable[[], dict[str, dict]]) -> tuple[dict[str, dict], int]:
    """Return each case's times in its fastest round, and the bare loop's fastest median in ns. The fastest
    round suffers least from other load on the machine.
    """
    bare, found = [], []
    for _ in range(rounds):
        bare.append(percentile(bare_loop(rows, 101), 50))
        found.append(run())
    best = {name: min((each[name] for each in found), key=_p50) for name in found[0]}
    return best, min(bare)


def _p50(times: dict[str, list[int]]) -> int:
    return percentile(times["whole"], 50)


def _targets(table: Table, cases: dict[str, dict], bare: int) -> None:
    plain, whole = cases["decode"], _p50(cases["decode"])
    worst = max(_p50(times) for name, times in cases.items() if name.startswith("all rows"))
    table.target("core / bare loop at 1,024 rows", percentile(plain["core"], 50) / bare, 3)
    table.target("whole step / bare loop at 1,024 rows", whole / bare, 8)
    table.target("stretch: whole step / bare loop at 1,024 rows", whole / bare, 4)
    table.target("aligned boundary / plain step at 1,024 rows", worst / whole, 3)
    table.target("p99 / p50 at 1,024 rows", percentile(plain["whole"], 99) / whole, 3)
    table.target("with state slots / without at 1,024 rows", _p50(cases[WITH_SLOTS]) / whole, 1.1)


def facts(table: Table, folder: Path, args: argparse.Namespace) -> None:
    count = 1000 if args.quick else 10_000
    full, checkpoint_us = steady(Shape(256), folder, count)
    table.target(f"full garbage collections in {count:,} steps", full, 0)
    table.facts.append(f"- A checkpoint of 256 rows, every 256th step: {checkpoint_us:.0f} µs.")
    num_steps = 1_000_000 if args.long else 5000 if args.quick else 200_000
    grown = memory(num_steps, folder)
    table.facts.append(f"- Memory over {num_steps:,} steps of coming and going requests: {grown:+.1f} MiB.")
    if args.trace:
        table.facts.append("- " + trace(args.trace, folder))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a step's cost without the model.")
    parser.add_argument("--rows", type=_sizes, default=SIZES, help="numbers of rows, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="print the targets as a last line of JSON")
    parser.add_argument("--long", action="store_true", help="measure memory over a million steps")
    parser.add_argument("--trace", type=Path, help="a ServeGen trace (.jsonl)")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    args = parser.parse_args()
    table = Table()
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        measure(table, Path(folder), args)
        facts(table, Path(folder), args)
    print(table.text())
    if args.out:
        args.out.write_text("# Cost of a step\n\n" + table.text())
    if args.json:
        print(json.dumps({"targets": table.targets}))


if __name__ == "__main__":
    main()
