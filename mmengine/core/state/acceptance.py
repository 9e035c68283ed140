"""Estimates how likely drafts are accepted: trials and hits of each row, and of each drafter over all rows.

A trial is a draft whose place was reached: the accepted drafts and the first rejected draft.
"""

import numpy as np

from mmengine.core.state.step_cost import ONE

DRAFTERS = 8  # drafters with larger numbers count as the last one
TRIAL = 256  # the weight of one trial
MEMORY = 24 * TRIAL  # trials of a row at which older trials fade; a drafter has 16 times as many
PRIOR = 4 * TRIAL  # trials for which the drafter's own share of hits counts in a row's estimate
FIRST_HITS, FIRST_TRIALS = 3 * TRIAL, 4 * TRIAL  # of a drafter without trials
ARRAYS = ("hits", "trials", "drafter_hits", "drafter_trials")


class Acceptance:
    """Acceptance counts. Columns are [drafter, row] or [drafter]."""

    def __init__(self, num_rows: int):
        self.hits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.trials = np.zeros((DRAFTERS, num_rows), np.int32)
        self.drafter_hits = np.zeros(DRAFTERS, np.int64)
        self.drafter_trials = np.zeros(DRAFTERS, np.int64)
        # verified drafts that are not counted yet, to be counted together
        self._unread: list[tuple[np.ndarray, ...]] = []

    def admit(self, row: int) -> None:
        """Forget the row's counts: another request has the row."""
        self.count()
        self.hits[:, row] = self.trials[:, row] = 0

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """Note the verified drafts of `rows` (intp [m]): `drafted` drafts, 0 for none, and `counts` tokens
        given, int32.
        """
        self._unread.append((rows, drafters, drafted, np.frombuffer(counts, np.int32)))

    def count(self) -> None:
        """Count the noted drafts. This call's time does not change the result."""
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
        """Reduce old trials' weight."""
        for hits, trials, memory in (
            (self.hits, self.trials, MEMORY),
            (self.drafter_hits, self.drafter_trials, 16 * MEMORY),
        ):
            old = trials > memory
            if old.any():
                hits[old] >>= 1
                trials[old] >>= 1

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the chance that each drafter's draft is accepted, in 1/65536: int64 [drafters, n]."""
        usual = (self.drafter_hits + FIRST_HITS) * ONE // (self.drafter_trials + FIRST_TRIALS)
        hits = self.hits[:, rows].astype(np.int64) * ONE + usual[:, None] * PRIOR
        return hits // (self.trials[:, rows] + PRIOR)

    def before_last(self) -> list[int]:
        """Return the drafters' numbers that drafted, without the highest, in falling order. Noted
        drafts must be counted.
        """
        return self.drafter_trials.nonzero()[0][-2::-1].tolist()


def powers(chances: np.ndarray, most: int) -> np.ndarray:
    """Return chance, chance^2, …, in 1/65536: int64 [most, ...]."""
    table = np.empty((most, *chances.shape), np.int64)
    table[0] = chances
    for depth in range(1, most):
        table[depth] = table[depth - 1] * chances >> 16
    return table
