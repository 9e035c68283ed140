"""Splits the time of a native forward pass into linears, attention and the rest, with src/decoder/decoder.h's
clocks.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.report import Table
from benchmarks.profiling.phases import FORWARD, ROUNDS, Clocks, Watched, clocked_phases
from mmengine.native.library import load

PARTS = ("linears", "attention", "norms, rotation, residuals and the rest")


def forward_split(title: str, ours: EngineRunner, work: Watched) -> Table | None:
    """Return a table with the layers' times, from the fastest run of `work` in ROUNDS runs. None if there
    is no native decoder, or if its clocks measured nothing.
    """
    library = load()
    if library is None:
        return None
    found = []
    for _ in range(ROUNDS):
        clocks, spent = Clocks(), (ctypes.c_int64 * len(PARTS))()
        work(_watched(ours, library, clocks, spent))
        found.append((sum(spent), clocks, list(spent)))
    total, clocks, spent = min(found, key=lambda one: one[0])
    if not total:
        return None
    layers = sum(clocks.spent[phase] for phase in FORWARD if phase != "logits")
    table = Table(f"{title}: the layers", ("part", "µs a step", "of the layers"))
    for name, taken in (*zip(PARTS, spent, strict=True), ("around them, in Python", layers - total)):
        table.rows.append((name, f"{taken / clocks.num_steps / 1e3:.0f}", f"{taken / layers:.1%}"))
    return table


@contextmanager
def _watched(ours: EngineRunner, library: ctypes.CDLL, clocks: Clocks, spent: ctypes.Array) -> Iterator[None]:
    library.mm_profile(spent)
    try:
        with clocked_phases(ours.engine, clocks):
            yield
    finally:
        library.mm_profile(None)
