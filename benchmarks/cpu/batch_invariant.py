"""Measure how much the setting batch_invariant slows down the included checkpoint.

Usage:

    python -m benchmarks batch_invariant    # about a minute
    python -m benchmarks batch_invariant --out benchmarks/results/batch_invariant.md
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.measure import Rounds, use_threads
from benchmarks.common.report import Table, machine_lines, markdown, show

if TYPE_CHECKING:
    from benchmarks.common.engine_runner import EngineRunner
    from benchmarks.common.workload import Ask

TITLE = "Cost of batch_invariant"
WAYS = ("without", "with")
STEPS = 6  # consecutive steps before the other engine runs
LONGEST = 48  # maximum tokens in an answer
ROWS = 64


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 9,
    most_rows: Annotated[int, typer.Option(min=1, help="Maximum number of decoding rows.")] = ROWS,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the table.")] = None,
) -> None:
    """Measure decoding and mixed requests with batch_invariant and without."""
    use_threads(1)
    # imported here, because torch must not be loaded before the number of threads is set
    from benchmarks.common.engine_runner import EngineRunner
    from benchmarks.common.workload import mixed
    from mmengine.config import EngineConfig

    table = Table("Embedded checkpoint, float32, one thread", ("CPU time, ms", *WAYS, "ratio"))
    with ExitStack() as stack:
        engines = {}
        for way in WAYS:
            config = EngineConfig(batch_invariant=way == "with", spec="none", max_model_len=1024)
            engines[way] = EngineRunner(config=config)
            stack.callback(engines[way].close)
        asks = mixed(engines["with"].engine.processor, most_rows, LONGEST)
        for count in sorted({1, min(16, most_rows), most_rows}):
            chosen = [replace(ask, num_new=64 + 2 * rounds * STEPS) for ask in asks[:count]]
            _add(table, f"a step of {count} rows", _decoding(engines, chosen, rounds))
        turns = {way: lambda ours=ours: ours.answer(asks) for way, ours in engines.items()}
        found = Rounds().run(turns, rounds, lambda: None)
        _add(table, f"{most_rows} mixed requests", {way: found.cpu(way) for way in WAYS})
    facts = [*machine_lines(threads=1), f"medians of {rounds} turns"]
    show([table], facts)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(TITLE, [table], facts))


def _decoding(engines: "dict[str, EngineRunner]", asks: "Sequence[Ask]", rounds: int) -> dict[str, float]:
    """Return the median CPU seconds for a decode step, keyed by "without" and "with"."""
    running = {way: ours.begin(asks, plain=True) for way, ours in engines.items()}
    samples: dict[str, list[float]] = {way: [] for way in engines}
    for each in running.values():
        each.start()
    for number in range(rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            samples[way] += [sample.cpu for sample in running[way].steps(STEPS)]
    for each in running.values():
        each.finish()
    return {way: median(found) for way, found in samples.items()}


def _add(table: Table, work: str, seconds: dict[str, float]) -> None:
    without, with_it = (seconds[way] * 1e3 for way in WAYS)
    table.rows.append((work, f"{without:.3g}", f"{with_it:.3g}", f"{with_it / without:.2f}"))


if __name__ == "__main__":
    typer.run(main)
