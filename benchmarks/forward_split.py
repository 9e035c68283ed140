"""What of a native forward is linears, attention and the rest, which one call for all layers does not show.

The attention is seen by hiding that the backend is native: the decoder then goes layer by layer and calls
it between its halves, as it does with any other. The linears are run alone, all layers of them, on as many
tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import clocked
from ours import Ours
from phases import least_disturbed
from report import Table

ROUNDS = 7
FORWARD = "forward, the rest"


class Port:
    """An attention backend of which only the port is seen."""

    def __init__(self, backend: Any) -> None:
        self.begin, self.append, self.run = backend.begin, backend.append, backend.run
        self.reads_unwritten = backend.reads_unwritten


def forward_split(title: str, ours: Ours, rows: int, work: Callable) -> Table | None:
    """Parts of the forward of steps in which `rows` rows decode; None where no native decoder runs.
    `work` takes a context manager in which its steps run."""
    layers = getattr(ours.engine.built.executor._runner._model._text, "_decoder", None)
    if layers is None:
        return None
    whole = _phases(ours, work)
    with _hidden(ours):
        halves = _phases(ours, work)
    linears = _linears(layers._weights, rows)
    parts = (
        ("linears of the layers, run alone", linears),
        ("attention, between two halves of a layer", halves["attention"]),
        ("norms, rotation, SwiGLU, residuals: what is left", halves[FORWARD] - linears),
        ("all layers in halves", halves[FORWARD] + halves["attention"]),
        ("all layers as they run", whole[FORWARD] + whole.get("attention", 0)),
        ("logits", whole["logits"]),
    )
    table = Table(
        f"{title}: the forward",
        ("part", "µs a step"),
        notes=["The parts are measured apart, each with some microseconds of Python around its calls."],
    )
    table.rows = [(name, f"{spent / 1e3:.0f}") for name, spent in parts]
    return table


def _phases(ours: Ours, work: Callable) -> dict[str, float]:
    """Mean ns a step by phase."""
    clocks = least_disturbed(ours.engine, work)
    return {phase: spent / clocks.num_steps for phase, spent in clocks.spent.items()}


@contextmanager
def _hidden(ours: Ours) -> Iterator[None]:
    runner = ours.engine.built.executor._runner
    backend, runner._attention = runner._attention, Port(runner._attention)
    try:
        yield
    finally:
        runner._attention = backend


def _linears(layers: list, rows: int) -> float:
    """ns of all linears of all layers, one after the other; what the calls cost on no rows is left out."""
    linears = [linear for each in layers for linear in (each.qkv, each.out, each.gate_up, each.down)]

    def best(count: int) -> float:
        inputs = {linear.c.k: torch.randn(count, linear.c.k).to(linear.dtype) for linear in linears}

        def run() -> None:
            for linear in linears:
                linear(inputs[linear.c.k])

        return min(clocked(run)[0].wall for _ in range(ROUNDS)) * 1e9

    return best(rows) - best(0)
