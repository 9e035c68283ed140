"""How much of what the model sees, and when: the stages of the training run."""

import random
from dataclasses import dataclass, field

# A question is drawn by these weights among those its image allows; JSON is in every image row.
TASK_WEIGHTS = {
    "describe": 1.0, "count": 0.7, "colour_of": 3.0, "size_of": 2.5, "where": 3.5, "what_at": 1.5,
    "count_colour": 1.2, "background": 0.3, "exists": 1.5,
    "more": 4.0, "count_in": 1.0, "describe_in": 1.0,
    "direction": 1.0, "becomes": 1.0, "happens": 1.0,
}


@dataclass(frozen=True)
class Stage:
    """A part of the run: its length in steps and the draw of images."""

    steps: int
    sides: dict[int, float]  # side in pixels -> how often
    counts: tuple[float, float, float, float] = (1.0, 1.2, 1.4, 1.4)  # of scenes with 1 to 4 things
    lookup_weight: float = 2.0  # weight of a token in a short answer against one in JSON
    tasks: dict[str, float] = field(default_factory=lambda: TASK_WEIGHTS)


def draw_task(rng: random.Random, tasks: list[str], stage: Stage) -> str:
    """One of `tasks`, by the stage's weights."""
    return rng.choices(tasks, [stage.tasks[task] for task in tasks])[0]


@dataclass(frozen=True)
class Phase:
    """Stages under one learning rate schedule, started with fresh optimisers."""

    stages: tuple[Stage, ...]
    rate: float = 1.0  # factor on the learning rates
    probe: float = 0.0  # first weight of the auxiliary loss; it falls to 0 at 70 % of the phase

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


# One size to begin with: at 96 pixels a merged visual token is just one cell of the 3x3 grid.
MIXED_SIDES = {96: 0.5, 64: 0.12, 128: 0.14, 160: 0.08, 192: 0.08, 256: 0.08}
PHASES = (
    Phase((Stage(1200, {96: 1.0}), Stage(3200, MIXED_SIDES)), probe=2.0),
    Phase((Stage(2000, MIXED_SIDES),), rate=0.3),
)
