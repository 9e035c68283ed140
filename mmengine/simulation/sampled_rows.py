"""Helpers for simulated executors: the rows of a plan that sample tokens, their accepted drafts, and the
pooled rows' vectors.
"""

from typing import NamedTuple

import numpy as np

from mmengine.core.executor import PooledVector, StepPlan


class SampledRows(NamedTuple):
    """The s rows of a plan that sample tokens. All arrays are int64 [s]."""

    rows: np.ndarray
    last: np.ndarray  # each row's last token, as an index into the step's tokens
    num_drafts: np.ndarray
    num_known: np.ndarray  # number of known tokens, without drafts

    def accepted(self, input_ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return how many drafts each row accepts, int64 [s].

        `input_ids`: the plan's tokens, drafts included. `tokens` [s, k + 1]: the tokens that the model
        generates from position `num_known` on.
        """
        number = np.arange(tokens.shape[1] - 1)
        there = number < self.num_drafts[:, None]
        index = (self.last - self.num_drafts + 1)[:, None] + number
        drafts = input_ids[np.where(there, index, 0)]
        right = there & (drafts == tokens[:, :-1])
        return np.logical_and.accumulate(right, axis=1).sum(axis=1)


def pooled_vectors(plan: StepPlan, sums: np.ndarray) -> tuple[PooledVector, ...]:
    """Return a vector, float32 [4], for each pooled row. `sums`: a number for each token, uint64 [t]. A row's
    vector encodes the number for the row's last token.
    """
    last = np.cumsum(plan.num_scheduled, dtype=np.int64) - 1
    found = []
    for place, _ in plan.pool:
        pieces = np.frombuffer(np.uint64(sums[last[place]]).tobytes(), np.uint16)
        found.append(PooledVector.of(int(plan.rows[place]), pieces.astype(np.float32)))
    return tuple(found)


def sampled_rows(plan: StepPlan) -> SampledRows:
    last = np.cumsum(plan.num_scheduled, dtype=np.int64)[plan.sample] - 1
    num_drafts = np.zeros(len(last), np.int64)
    if plan.num_drafts is not None:
        num_drafts += plan.num_drafts[plan.sample]
    rows = plan.rows[plan.sample].astype(np.int64)
    return SampledRows(rows, last, num_drafts, plan.token_index[last] + 1 - num_drafts)
