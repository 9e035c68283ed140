"""Finds the positions at which rows sample in a step with drafts, and how many drafts each row accepts."""

from typing import NamedTuple

import numpy as np

from mmengine.core.executor import StepPlan

NOTHING = -2  # stands for a missing draft; differs from every token id and from ERROR_TOKEN


class Runs(NamedTuple):
    """The p sampling positions for s rows. A row samples at its last known token and at each draft."""

    places: np.ndarray  # intp [p], index of each position in the step
    first: np.ndarray  # intp [s], each row's first index in `places`
    row_of: np.ndarray  # intp [p], each position's row, from 0 to s - 1
    follows: np.ndarray  # int32 [p], the draft after each position; NOTHING at a row's last position

    def counts(self, token_ids: np.ndarray) -> np.ndarray:
        """Return how many tokens each row returns, int64 [s]. `token_ids`: the sampled tokens,
        int32 [p].

        A row returns its sampled tokens up to and including the first token that differs from its draft.
        """
        ends = np.flatnonzero(token_ids != self.follows)
        return ends[np.searchsorted(ends, self.first)] - self.first + 1

    def drafts_at(self, selected: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """Return each selected row's first position and drafts. `selected`: indices into `places`. A row
        is selected with all its positions or with none.
        """
        heads = selected[selected == self.first[self.row_of[selected]]]
        sizes = np.diff(np.append(self.first, len(self.places)))[self.row_of[heads]]
        ends = (heads + sizes - 1).tolist()
        return heads, [self.follows[head:end].tolist() for head, end in zip(heads.tolist(), ends)]


def runs_of(plan: StepPlan) -> Runs | None:
    """Return the plan's sampling positions, or None if no sampling row has drafts."""
    # With as many tokens as rows, no row has a draft.
    if plan.num_drafts is None or len(plan.input_ids) == len(plan.rows):
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
