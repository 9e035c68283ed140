"""Assigns ids to runs. A run is an image's tokens, the tokens of all media, or a whole prompt. A run's tokens
attend to one another in both directions.
"""

from itertools import chain

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.models.spec import RunKind
from mmengine.request import Request


class RunIds:
    """Stores the run ids of each row's prompt. `kind`: the model's run kind."""

    def __init__(self, kind: RunKind, max_rows: int) -> None:
        self._kind = kind
        # For each row, int32 [num_prompt], -1 outside of runs; None for a prompt without runs.
        self._prompts: list[np.ndarray | None] = [None] * max_rows
        self._num_prompt = np.zeros(max_rows, np.int64)

    def admit(self, row: int, request: Request) -> None:
        self._prompts[row] = prompt_run_ids(self._kind, request)
        self._num_prompt[row] = 0 if self._prompts[row] is None else len(request.prompt_token_ids)

    def of(self, plan: StepPlan) -> np.ndarray | None:
        """Return a run id for each token in the step, int32 [t], or None if no token belongs to a run."""
        in_prompt = (plan.num_computed < self._num_prompt[plan.rows]).nonzero()[0]
        if not len(in_prompt):
            return None
        starts = np.cumsum(plan.num_scheduled) - plan.num_scheduled
        ids = np.full(len(plan.input_ids), -1, np.int32)
        for place in in_prompt.tolist():
            first, prompt = int(plan.num_computed[place]), self._prompts[plan.rows[place]]
            assert prompt is not None
            chunk = prompt[first : first + int(plan.num_scheduled[place])]
            ids[starts[place] : starts[place] + len(chunk)] = chunk
        return ids if (ids >= 0).any() else None


def prompt_run_ids(kind: RunKind, request: Request) -> np.ndarray | None:
    """Return the run ids of a prompt's tokens, int32 [n], or None if no token belongs to a run."""
    if kind == "prompt":
        return np.zeros(len(request.prompt_token_ids), np.int32)
    if not request.media:
        return None
    ids = np.full(len(request.prompt_token_ids), -1, np.int32)
    runs = chain.from_iterable(item.runs for item in request.media)
    for number, (start, length) in enumerate(runs):
        ids[start : start + length] = number if kind == "run" else 0
    return ids
