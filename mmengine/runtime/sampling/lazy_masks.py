"""Applies grammars lazily on a CPU: tokens are sampled without a mask. A mask is computed only if a row's
grammar refuses the sampled token.

If the best token is allowed, it is also the best allowed token, even with noise, penalties and biases. But
top-k, top-p, min-p, typical-p and confidences depend on all allowed tokens. With these options, masks are
computed before sampling. On GPUs, masks are always computed before sampling, because reading sampled tokens
would wait for the device.
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np

from mmengine.runtime.rows import CLOSES, CONFIDENCE, GRAMMAR, MIN_P, TOP_K, TOP_P, TYPICAL
from mmengine.runtime.sampling.runs import Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler, TokenChoice
from mmengine.structured_output.rows.rows import Masks, RowMatchers

NEEDS_MASK = TOP_K | TOP_P | MIN_P | TYPICAL | CONFIDENCE


class LazyMaskResult(NamedTuple):
    """Rows whose grammar is complete, and rows that failed. A row is an index among the sampling rows.

    `complete`: row -> number of tokens up to the grammar's end. `errors`: row -> reason why the row gets no
    token.
    """

    complete: dict[int, int]
    errors: dict[int, str]


def uses_lazy_mask(options: np.ndarray) -> np.ndarray:
    """Return which rows use lazy masks, bool [s]. `options` [s]: each row's sampling options, as flags."""
    return (options & (GRAMMAR | CLOSES | NEEDS_MASK)) == GRAMMAR


def apply_lazy_masks(
    sampler: Sampler,
    matchers: RowMatchers,
    chosen: TokenChoice,
    batch: SampleRows,
    runs: Runs | None,
    continuing: Sequence[int],
) -> LazyMaskResult:
    """Advance the grammars for the rows `continuing` (ascending indices among the sampling rows), and correct
    refused tokens.

    A grammar consumes the row's sampled tokens up to and including the first token that differs from its
    draft. If the grammar refuses a token, an allowed token is sampled and replaces the refused token in
    `chosen`.
    """
    if not continuing:  # always on a GPU, where reading tokens would wait for the device
        return LazyMaskResult({}, {})
    walk = _Walk(sampler, matchers, chosen, batch, runs)
    refused = [row for row in continuing if not walk.go(row)]
    while refused:
        refused = [row for row in walk.correct(refused) if not walk.go(row)]
    return walk.found


class _Walk:
    """Advances the grammars of a step's rows along their sampled tokens."""

    def __init__(
        self,
        sampler: Sampler,
        matchers: RowMatchers,
        chosen: TokenChoice,
        batch: SampleRows,
        runs: Runs | None,
    ):
        self._sampler, self._matchers, self._chosen, self._batch = sampler, matchers, chosen, batch
        self._tokens, self._largest = chosen.token_ids.tolist(), chosen.largest.tolist()
        self._numbers = batch.rows.tolist()
        self._first = range(len(self._tokens)) if runs is None else runs.first.tolist()
        self._follows = None if runs is None else runs.follows.tolist()
        self._at: dict[int, int] = {}  # row -> position of the refused token
        self._corrected: set[int] = set()
        self.found = LazyMaskResult({}, {})

    def go(self, row: int) -> bool:
        """Advance the row's grammar by the sampled tokens. Returns False if the grammar refuses a token."""
        first = self._first[row]
        number, position = self._numbers[first], self._at.get(row, first)
        run = self._run_at(position)
        num_said, is_complete = self._matchers.consume_run(number, run)
        if is_complete:
            error = self._matchers.error_of(number)
            if error:
                self.found.errors[row] = error
            else:
                self.found.complete[row] = position - first + num_said
        elif num_said < len(run):
            self._at[row] = position + num_said
            return False
        return True

    def _run_at(self, position: int) -> list[int]:
        """Return a row's sampled tokens from `position` on.

        The list ends after the first token that differs from its draft, or before a position without finite
        logits.
        """
        end, tokens, largest, follows = position, self._tokens, self._largest, self._follows
        while isfinite(largest[end]):
            end += 1
            if follows is None or tokens[end - 1] != follows[end - 1]:
                break
        return tokens[position:end]

    def correct(self, rows: list[int]) -> list[int]:
        """Sample again, with a mask, at each row's refused token. Returns the rows that have a new token."""
        for row in rows:
            if self._at[row] in self._corrected:
                why = self._matchers.error_of(int(self._batch.rows[self._at[row]]))
                self.found.errors[row] = why or "the grammar refuses a token that its mask allows"
        rows = [row for row in rows if row not in self.found.errors]
        numbers = [int(self._batch.rows[self._at[row]]) for row in rows]
        bits, errors = self._matchers.masks(numbers)
        for index, what in errors.items():
            self.found.errors[rows[index]] = what
        kept = [index for index in range(len(rows)) if index not in errors]
        rows = [rows[index] for index in kept]
        positions = np.array([self._at[row] for row in rows], np.intp)
        if rows:
            self._sampler.choose_again(self._chosen, self._batch, Masks(positions, bits[kept]))
            for position in positions.tolist():
                self._tokens[position] = int(self._chosen.token_ids[position])
                self._largest[position] = float(self._chosen.largest[position])
        self._corrected.update(positions.tolist())
        return rows
