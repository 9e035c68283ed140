"""Measures the time of each phase of an engine's steps. A phase's time excludes nested phases."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mmengine.core import batch as planning
from mmengine.core import engine as loop
from mmengine.runtime import runner as runner_module
from mmengine.serve.engine.engine import Engine

FRONT, CORE, LOG = "front", "core, the rest", "log"
LAYERS = "forward, the rest"
FORWARD = ("embed", "features", "attention", LAYERS, "logits")  # The model's phases.
ENCODE = "encode"
ROUNDS = 3
Watched = Callable[[AbstractContextManager], None]  # Enters the context, and runs the measured steps there.


class Clocks:
    """Wall-clock nanoseconds per phase. A phase's clock stops while a nested phase runs."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self.num_steps = 0  # Number of steps in which the model ran.
        self._inner: list[int] = []  # For each open phase: nanoseconds spent in nested phases.

    def around(self, phase: str, call: Callable) -> Callable:
        inner, spent, now = self._inner, self.spent, time.perf_counter_ns

        def timed(*args: Any, **options: Any) -> Any:
            inner.append(0)
            begin = now()
            try:
                return call(*args, **options)
            finally:
                took = now() - begin
                self.num_steps += phase is LAYERS
                spent[phase] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return timed

    def take(self) -> dict[str, int]:
        """Return each phase's nanoseconds since the last call of `take`."""
        found = dict(self.spent)
        self.spent.clear()
        return found


def least_disturbed(engine: Engine, work: Watched) -> Clocks:
    """Return the clocks of the fastest among ROUNDS runs of `work`."""
    runs = [Clocks() for _ in range(ROUNDS)]
    for clocks in runs:
        work(clocked_phases(engine, clocks))
    return min(runs, key=lambda clocks: sum(clocks.spent.values()) / clocks.num_steps)


def places(engine: Engine) -> list[tuple[Any, str, str]]:
    """Return (object or module, function name, phase) for each timed function of an engine on a CPU."""
    core, executor = engine.built.core, engine.built.executor
    runner = executor._runner
    model, attention = runner._model, runner._attention
    return [
        (engine, "step", FRONT),
        (core, "step", CORE),
        (core._scheduler, "schedule", "core schedule"),
        (loop, "evolve", "core evolve"),
        (planning, "batch", "core batch"),
        (loop, "complete", "core complete"),
        (core.sink, "append", LOG),
        (core.sink, "commit", LOG),
        (executor, "collect", "executor, the rest"),
        (runner_module, "prepare", "inputs"),
        (attention, "begin", "inputs"),
        (runner_module, "encode", ENCODE),
        (model, "embed", "embed"),
        (runner._features, "place", "features"),
        (model, "forward", LAYERS),
        (attention, "append", "attention"),
        (attention, "run", "attention"),
        (model, "logits", "logits"),
        (runner, "_sample", "sampling"),
        (runner, "finish", "finish"),
    ]


@contextmanager
def clocked_phases(engine: Engine, clocks: Clocks) -> Iterator[None]:
    """Measure every phase of `engine` with `clocks` while the block runs."""
    undo = []
    try:
        for owner, name, phase in places(engine):
            original, was_own = getattr(owner, name), name in vars(owner)
            undo.append((owner, name, original, was_own))
            setattr(owner, name, clocks.around(phase, original))
        yield
    finally:
        for owner, name, original, was_own in reversed(undo):
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
