"""How likely drafts are kept: trials and hits of each row, and of each drafter over all rows.

A trial is a draft whose place was reached: those kept, and the first that was not.
"""

import numpy as np

from mmengine.core.state.step_cost import ONE

DRAFTERS = 8  # numbers that are told apart; those beyond count as the last one
TRIAL = 256  # what one trial adds
MEMORY = 24 * TRIAL  # trials of a row, and of a drafter 16 times as many, at which older ones fade
PRIOR = 4 * TRIAL  # trials that the drafter's own share of hits counts for in a row's
FIRST_HITS, FIRST_TRIALS = 3 * TRIAL, 4 * TRIAL  # of a drafter that was never judged
ARRAYS = ("hits", "trials", "drafter_hits", "drafter_trials")


class Acceptance:
    """Columns are [drafter, row] or [drafter]."""

    def __init__(self, num_rows: int):
        self.hits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.trials = np.zeros((DRAFTERS, num_rows), np.int32)
        self.drafter_hits = np.zeros(DRAFTERS, np.int64)
        self.drafter_trials = np.zeros(DRAFTERS, np.int64)
        self._unread: list[tuple[np.ndarray, ...]] = []  # what was judged, to be counted together

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.count()
        self.hits[:, row] = self.trials[:, row] = 0

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """Of rows (intp [m]) `drafted` drafts, or none, were verified; each gave `counts` tokens, int32."""
        self._unread.append((rows, drafters, drafted, np.frombuffer(counts, np.int32)))

    def count(self) -> None:
        """Count what was judged; when this is done is all the same."""
        if not self._unread:
            return
        rows, drafters, drafted, counts = map(np.concatenate, zip(*self._unread, strict=True))
        self._unread.clear()
        some = drafted.nonzero()[0]
        rows, drafted, counts = rows[some], drafted[some], counts[some]
        drafters = drafters[some].clip(0, DRAFTERS - 1)
        accepted = np.minimum(counts - 1, drafted).clip(0)
        hits = accepted * TRIAL
        trials = hits + (accepted < drafted) * TRIAL
        np.add.at(self.hits, (drafters, rows), hits)
        np.add.at(self.trials, (drafters, rows), trials)
        np.add.at(self.drafter_hits, drafters, hits)
        np.add.at(self.drafter_trials, drafters, trials)

    def fade(self) -> None:
        """What was long ago counts less."""
        for hits, trials, memory in (
            (self.hits, self.trials, MEMORY),
            (self.drafter_hits, self.drafter_trials, 16 * MEMORY),
        ):
            old = trials > memory
            if old.any():
                hits[old] >>= 1
                trials[old] >>= 1

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """How likely a draft of each drafter is kept, in 1/65536: int64 [drafters, n]."""
        usual = (self.drafter_hits + FIRST_HITS) * ONE // (self.drafter_trials + FIRST_TRIALS)
        hits = self.hits[:, rows].astype(np.int64) * ONE + usual[:, None] * PRIOR
        return hits // (self.trials[:, rows] + PRIOR)

    def before_last(self) -> list[int]:
        """Who drafted, but for the highest number, falling. What was judged must be counted."""
        return self.drafter_trials.nonzero()[0][-2::-1].tolist()


def powers(chances: np.ndarray, most: int) -> np.ndarray:
    """chance, chance^2, …, in 1/65536: int64 [most, ...]."""
    table = np.empty((most, *chances.shape), np.int64)
    table[0] = chances
    for depth in range(1, most):
        table[depth] = table[depth - 1] * chances >> 16
    return table
