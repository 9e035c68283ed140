"""The positions at which a step with drafts samples, and how much of each row's drafts it keeps."""

from typing import NamedTuple

import numpy as np

from mmengine.core.executor import StepPlan

NOTHING = -2  # no token, and no sign for the lack of one


class Runs(NamedTuple):
    """s rows sample at p positions: each at its last known token and at each draft behind it."""

    places: np.ndarray  # intp [p], in the batch
    first: np.ndarray  # intp [s], where a row's positions begin among the p
    row_of: np.ndarray  # intp [p], index of the position's row among the s
    follows: np.ndarray  # int32 [p], the draft behind the position; NOTHING at a row's last one

    def counts(self, token_ids: np.ndarray) -> np.ndarray:
        """Tokens that each row gives when int32 [p] are sampled: as long as the draft behind is the one that
        was sampled, and one more. int64 [s]."""
        ends = np.flatnonzero(token_ids != self.follows)
        return ends[np.searchsorted(ends, self.first)] - self.first + 1

    def drafts_at(self, selected: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """Of whole runs, given by their positions `selected`: their first positions, and their drafts."""
        heads = selected[selected == self.first[self.row_of[selected]]]
        sizes = np.diff(np.append(self.first, len(self.places)))[self.row_of[heads]]
        ends = (heads + sizes - 1).tolist()
        return heads, [self.follows[head:end].tolist() for head, end in zip(heads.tolist(), ends)]


def runs_of(plan: StepPlan) -> Runs | None:
    """None where no row that samples has drafts."""
    if plan.num_drafts is None or len(plan.input_ids) == len(plan.rows):  # one token each, which is known
        return None
    num_drafts = plan.num_drafts[plan.sample]
    if not num_drafts.any():
        return None
    sizes = num_drafts + 1
    ends = np.cumsum(sizes)
    first = (ends - sizes).astype(np.intp)
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    start = np.cumsum(plan.num_scheduled)[plan.sample] - sizes
    places = np.arange(ends[-1]) + (start - first)[row_of]
    follows = np.full(len(places), NOTHING, np.int32)
    follows[:-1] = plan.input_ids[places[:-1] + 1]
    follows[ends - 1] = NOTHING
    return Runs(places, first, row_of, follows)
