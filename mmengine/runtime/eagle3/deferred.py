"""Steps that a head reads later, all at once: while nobody drafts, they can wait."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import StepPlan
from mmengine.runtime.eagle3.seen import Seen
from mmengine.spec_decode.texts import Texts

MOST_STEPS = 32


class Deferred:
    """Steps one after the other that computed one token of each of the same rows."""

    def __init__(self) -> None:
        self._steps: list[Seen] = []
        self._rows = b""

    def __len__(self) -> int:
        return len(self._steps)

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether `plan` may run while they wait: nobody else gets their blocks, and nothing is copied."""
        same = len(plan.input_ids) == len(plan.rows) and plan.rows.tobytes() == self._rows
        return same and not (plan.admitted or plan.swap_out is not None or plan.copy is not None)

    def takes(self, seen: Seen) -> bool:
        """Whether the step, whose next tokens are known, can wait too."""
        plan = seen.plan
        if len(plan.sample) != len(plan.rows) or len(plan.input_ids) != len(plan.rows):
            return False
        return not self._steps or (len(self._steps) < MOST_STEPS and plan.rows.tobytes() == self._rows)

    def add(self, seen: Seen, texts: Texts) -> None:
        """What rows say next is looked up now: later they may be others'."""
        plan = seen.plan
        self._rows = plan.rows.tobytes()
        following = texts.tokens[plan.rows, plan.token_index + 1].astype(np.int64)
        self._steps.append(msgspec.structs.replace(seen, following=following))

    def take(self) -> Seen:
        """All of them as one step; none waits any more."""
        steps, self._steps = self._steps, []
        first, last, count = steps[0].plan, steps[-1].plan, len(steps)
        plan = msgspec.structs.replace(
            last,
            num_scheduled=np.full(len(first.rows), count, np.int32),
            num_computed=first.num_computed,
            token_index=_by_row([each.plan.token_index for each in steps]),
            slot_mapping=_by_row([each.plan.slot_mapping for each in steps]),
        )
        return Seen(
            plan,
            torch.stack([each.positions for each in steps], 2).flatten(1),
            torch.stack([each.taps for each in steps], 1).flatten(0, 1),
            _by_row([each.following for each in steps]),
        )


def _by_row(columns: list[np.ndarray]) -> np.ndarray:
    """[n] of each step, as [n * steps]: row after row."""
    return np.stack(columns, 1).ravel()
