"""Limits a text's reasoning: when the token budget is used up, the end marker's tokens are forced.

Forced tokens depend only on the row's earlier tokens. Drafts, a preemption or a crash therefore do not change
where the reasoning ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmengine.request import Request, ThinkingBudget
from mmengine.runtime.sampling.runs import Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import ForcedTokens


class ReasoningState(NamedTuple):
    """A text's progress in its reasoning.

    `opened`: number of start marker tokens found so far. `said`: number of tokens after the start marker.
    `closed`: number of end marker tokens found so far. `is_over`: whether the text has no reasoning, or the
    reasoning has ended.
    """

    opened: int = 0
    said: int = 0
    closed: int = 0
    is_over: bool = False

    @classmethod
    def begin(cls, budget: ThinkingBudget) -> "ReasoningState":
        """Return the state for an empty text."""
        if budget.is_open:
            return cls(len(budget.start))
        return cls(is_over=not budget.start)

    def after(self, budget: ThinkingBudget, token: int) -> "ReasoningState":
        if self.is_over:
            return self
        if self.opened < len(budget.start):
            return self._replace(opened=self.opened + 1, is_over=token != budget.start[self.opened])
        tail, closed = (*budget.end[: self.closed], token), self.closed + 1
        while tail[len(tail) - closed :] != budget.end[:closed]:
            closed -= 1
        return self._replace(said=self.said + 1, closed=closed, is_over=closed == len(budget.end))

    def next(self, budget: ThinkingBudget) -> int | None:
        """Return the token that must come next, or None if any token is allowed."""
        if self.is_over or self.opened < len(budget.start) or self.said < budget.tokens:
            return None
        return budget.end[self.closed]


class ThinkingRows:
    """The reasoning states for rows with a reasoning budget and unfinished reasoning."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[ThinkingBudget, ReasoningState]] = {}

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> None:
        """Assign `row` to `request`. `token_ids`: int32, the prompt and all output tokens."""
        self._rows.pop(row, None)
        if request.thinking is not None:
            self._rows[row] = request.thinking, ReasoningState.begin(request.thinking)
            self._append(row, token_ids[len(request.prompt_token_ids) :].tolist())

    def forced_tokens(self, batch: SampleRows, runs: Runs | None) -> ForcedTokens:
        """Return the forced tokens, and their ascending indices among the sampling positions."""
        places: list[int] = []
        tokens: list[int] = []
        for place in self._reasoning(batch.rows):
            budget, reasoned = self._rows[int(batch.rows[place])]
            if runs is not None:
                for draft in runs.follows[runs.first[runs.row_of[place]] : place].tolist():
                    reasoned = reasoned.after(budget, draft)
            token = reasoned.next(budget)
            if token is not None:
                places.append(place)
                tokens.append(token)
        return ForcedTokens(places, tokens)

    def advance(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None) -> None:
        """Update the rows' reasoning states with the sampled tokens.

        `rows`: int32 [s]. `token_ids`: int32, the rows' tokens, concatenated. `counts` [s]: each row's token
        count; None: one token each.
        """
        ends = np.arange(1, len(rows) + 1) if counts is None else np.cumsum(counts)
        for index in self._reasoning(rows):
            start = int(ends[index - 1]) if index else 0
            self._append(int(rows[index]), token_ids[start : int(ends[index])].tolist())

    def _reasoning(self, rows: np.ndarray) -> list[int]:
        """Return the indices in `rows` of the rows with unfinished reasoning, ascending."""
        return np.flatnonzero(np.isin(rows, list(self._rows))).tolist() if self._rows else []

    def _append(self, row: int, token_ids: Sequence[int]) -> None:
        budget, reasoned = self._rows[row]
        for token in token_ids:
            reasoned = reasoned.after(budget, token)
        if reasoned.is_over:
            del self._rows[row]
        else:
            self._rows[row] = budget, reasoned
