"""Measure a decode step's time outside the model: inputs, sampling, the core, the log, and the front end."""

from collections.abc import Callable
from statistics import median

from benchmarks.common.engine_runner import EngineRunner
from benchmarks.common.report import Part, Table, Target
from benchmarks.common.workload import Ask, long_answers
from benchmarks.profiling.phases import CORE, FORWARD, FRONT, LOG, Clocks, clocked_phases

ROWS = (1, 16)
MOST = 0.10
GROUPS = (
    ("inputs", ("inputs", "executor, the rest")),
    ("sampling and finish", ("sampling", "finish")),
    ("core", (CORE, "core schedule", "core evolve", "core batch", "core complete")),
    ("log", (LOG,)),
    ("front", (FRONT,)),
)
Tick = Callable[[], None]


class ShareRuns:
    """Times the phases of decode steps, alternately with a log in memory and with a log on disk."""

    title = "share of a step"

    def __init__(self, ours: EngineRunner, logged: EngineRunner, num_new: int, rounds: int) -> None:
        self._sides = {"in memory": ours, "on disk": logged}
        self._num_new, self._rounds = num_new, rounds
        self.num_ticks = len(ROWS) * len(self._sides) * rounds

    def run(self, tick: Tick) -> Part:
        steps: dict[tuple[int, str], list[dict[str, int]]] = {}
        for rows in ROWS:
            for number in range(self._rounds):
                for log in list(self._sides)[:: -1 if number % 2 else 1]:
                    ours = self._sides[log]
                    asks = long_answers(ours.engine.processor, rows, self._num_new)
                    steps.setdefault((rows, log), []).extend(clocked_steps(ours, asks, self._num_new))
                    tick()
        names = [f"{name} µs" for name, _ in GROUPS]
        table = Table(
            "A decode step outside the model, embedded checkpoint",
            ("rows", "event log", "step µs", "forward µs", *names, "not the model"),
            notes=[
                "Medians over steps of plain greedy requests. forward: embedding, features, layers and "
                "logits, with KV append and attention. inputs: input arrays, attention metadata, and the "
                "executor around them. The clocks, some twenty pairs a step, are included."
            ],
        )
        table.rows = [self._row(rows, log, found) for (rows, log), found in steps.items()]
        return Part(
            [table],
            [
                Target(
                    f"not_the_model_16_rows_log_{log.replace(' ', '_')}",
                    share(steps[16, log]),
                    MOST,
                    most=True,
                )
                for log in self._sides
            ],
        )

    def _row(self, rows: int, log: str, steps: list[dict[str, int]]) -> tuple[str, ...]:
        micros = [median(sum(step.values()) for step in steps) / 1e3, median(map(forward_ns, steps)) / 1e3]
        for _, phases in GROUPS:
            micros.append(median(sum(step.get(phase, 0) for phase in phases) for step in steps) / 1e3)
        return (str(rows), log, *(f"{value:.0f}" for value in micros), f"{share(steps):.1%}")


def clocked_steps(ours: EngineRunner, asks: list[Ask], most: int, salt: str = "") -> list[dict[str, int]]:
    """Return the phases' times in up to `most` decode steps, as a dict from phase to ns for each step. All
    `asks` decode greedily in these steps.
    """
    steps, clocks = [], Clocks()
    with clocked_phases(ours.engine, clocks):
        running = ours.begin(asks, salt, plain=True)
        running.start()
        clocks.take()
        while len(steps) < most and running.steps(1):
            steps.append(clocks.take())
        running.finish()
    return steps


def forward_ns(step: dict[str, int]) -> int:
    return sum(step.get(phase, 0) for phase in FORWARD)


def share(steps: list[dict[str, int]]) -> float:
    """Return the median share of a step's time that is outside the model's forward pass."""
    return median(1 - forward_ns(step) / sum(step.values()) for step in steps)
