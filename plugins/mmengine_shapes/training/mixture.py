"""Defines the phases and stages of the training run. A stage has a mixture of training data."""

import random
from dataclasses import dataclass, field, replace

from mmengine_shapes.training.texts import TEXT_TASKS

# Relative frequencies of tasks among the questions about an image. Every image also has a JSON question.
TASK_WEIGHTS = {
    "describe": 1.0,
    "count": 0.7,
    "colour_of": 3.0,
    "size_of": 2.5,
    "where": 3.5,
    "what_at": 1.5,
    "count_colour": 1.2,
    "background": 0.3,
    "exists": 1.5,
    "more": 4.0,
    "count_in": 1.0,
    "describe_in": 1.0,
    "direction": 1.0,
    "becomes": 1.0,
    "happens": 1.0,
}
EVEN_TEXTS = dict.fromkeys(TEXT_TASKS, 1.0)


@dataclass(frozen=True)
class Stage:
    """A stage of the run, with a fixed mixture of training data."""

    steps: int
    sides: dict[int, float]  # An image's side in pixels -> relative frequency.
    # Relative frequencies of scenes with 1 to 4 shapes.
    counts: tuple[float, float, float, float] = (1.0, 1.2, 1.4, 1.4)
    lookup_weight: float = 2.0  # Loss weight for a short answer's tokens, relative to JSON.
    tasks: dict[str, float] = field(default_factory=lambda: TASK_WEIGHTS)
    texts: dict[str, float] = field(default_factory=lambda: EVEN_TEXTS)
    patches: int = 1400  # Maximum number of patches in a batch.
    clip_side: int = 96  # Largest side of clips, in pixels.
    pair_side: int = 128  # Largest side of pairs of images, in pixels.
    long_side: int = 96  # Largest side of an image after a long system prompt.


@dataclass(frozen=True)
class Phase:
    """Stages with a common learning rate schedule and new optimisers."""

    stages: tuple[Stage, ...]
    rate: float  # Factor for the learning rates.
    probe: float  # Initial weight of the auxiliary loss; 0 after 70 % of the schedule.
    schedule: int  # Number of steps in which the learning rate falls; the phase may end earlier.

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


def draw_task(rng: random.Random, tasks: list[str], stage: Stage) -> str:
    """Return one of `tasks`, drawn by the stage's weights."""
    return rng.choices(tasks, [stage.tasks[task] for task in tasks])[0]


def draw_text(rng: random.Random, stage: Stage) -> str:
    """Return a text task, drawn by the stage's weights."""
    return rng.choices(list(stage.texts), list(stage.texts.values()))[0]


# The first stage has only images with a side of 96 pixels, in which each visual token covers exactly a cell
# in the scene's 3x3 grid. In the second stage, half of the images have other sizes.
FIRST = Phase(
    stages=(
        Stage(1200, {96: 1.0}),
        Stage(1800, {96: 0.5, 64: 0.12, 128: 0.14, 160: 0.08, 192: 0.08, 256: 0.08}),
    ),
    rate=1.0,
    probe=2.0,
    schedule=4400,
)
SECOND_STAGE = Stage(
    1800,
    {64: 0.18, 96: 0.22, 128: 0.16, 160: 0.12, 192: 0.12, 224: 0.08, 256: 0.12},
    tasks={**TASK_WEIGHTS, "describe": 1.5, "count_colour": 2.0, "describe_in": 2.0, "happens": 3.0},
    texts={**EVEN_TEXTS, "facts": 5.0, "person_json": 2.0, "subtract": 2.0},
    patches=2600,
    clip_side=128,
    pair_side=192,
    long_side=128,
)
SECOND = Phase(stages=(SECOND_STAGE,), rate=0.6, probe=1.0, schedule=3300)
# An image of 64 pixels has four visual tokens, too few for the grid's nine cells. From the third phase on,
# the processor scales such images up; clips keep their size.
THIRD_SIDES = {64: 0.04, 96: 0.16, 128: 0.18, 160: 0.16, 192: 0.12, 224: 0.16, 256: 0.18}
THIRD = Phase(
    stages=(replace(SECOND_STAGE, steps=1600, sides=THIRD_SIDES, patches=3000),),
    rate=0.4,
    probe=0.5,
    schedule=1600,
)
PHASES = (FIRST, SECOND, THIRD)
