"""Samples first, and computes a grammar mask only for rows whose sampled token the grammar refuses (on a
CPU).

If the best token is allowed, it is also the best allowed token. This holds with noise,
penalties and biases too, because they change each token's logit independently. It does not hold with top-k,
top-p, min-p and typical-p, which compare a token with the others. For rows with such filters, and on devices
where reading the sampled tokens means waiting, masks are computed before sampling.
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np

from mmengine.runtime.rows import CLOSES, GRAMMAR, MIN_P, TOP_K, TOP_P, TYPICAL
from mmengine.runtime.sampling.runs import Runs
from mmengine.runtime.sampling.sample_rows import SampleRows
from mmengine.runtime.sampling.sampler import Sampler, TokenChoice
from mmengine.structured_output.rows.rows import Masks, RowMatchers

NEEDS_MASK = TOP_K | TOP_P | MIN_P | TYPICAL


class LazyMaskResult(NamedTuple):
    """The rows whose text is complete or failed, as indices into the sampling rows.

    `complete`: for each row whose grammar is complete, how many tokens it took. `errors`: for each row that
    gets no token, the reason.
    """

    complete: dict[int, int]
    errors: dict[int, str]


def uses_lazy_mask(options: np.ndarray) -> np.ndarray:
    """Return which rows use lazy masks, bool [s], from their `options` [s]."""
    return (options & (GRAMMAR | CLOSES | NEEDS_MASK)) == GRAMMAR


def apply_lazy_masks(
    sampler: Sampler,
    matchers: RowMatchers,
    chosen: TokenChoice,
    batch: SampleRows,
    runs: Runs | None,
    continuing: Sequence[int],
) -> LazyMaskResult:
    """Advance the grammars for the rows `continuing` (ascending indices into the sampling rows).

    A grammar takes the row's sampled tokens up to and including the first that differs from its draft. If it
    refuses a token, an allowed token is sampled and replaces it in `chosen`.
    """
    if not continuing:  # always on a GPU, where reading the choice would wait for the device
        return LazyMaskResult({}, {})
    walk = _Walk(sampler, matchers, chosen, batch, runs)
    refused = [row for row in continuing if not walk.go(row)]
    while refused:
        refused = [row for row in walk.correct(refused) if not walk.go(row)]
    return walk.found


class _Walk:
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
        self._at: dict[int, int] = {}  # for each row with a refused token, the position of this token
        self._corrected: set[int] = set()
        self.found = LazyMaskResult({}, {})

    def go(self, row: int) -> bool:
        """Advance the row's grammar by its sampled tokens. Returns False if the grammar refuses a token."""
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
        """Return the row's sampled tokens from `position` on.

        They end with the first that differs from its draft, or before the first without a finite logit.
        """
        end, tokens, largest, follows = position, self._tokens, self._largest, self._follows
        while isfinite(largest[end]):
            end += 1
            if follows is None or tokens[end - 1] != follows[end - 1]:
                break
        return tokens[position:end]

    def correct(self, rows: list[int]) -> list[int]:
        """Sample again with a mask at each row's refused token. Returns the rows that have no error."""
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
