"""Estimates the probability that a draft is accepted, from trial and hit counts for each row and
drafter.

A trial is a draft that was compared with a sampled token. An accepted draft is a hit. A row's first rejected
draft is a trial without a hit. Later drafts are not counted.
"""

import numpy as np

from mmengine.core.state.step_cost import ONE

DRAFTERS = 8  # number of drafters with separate counts; further drafters are counted with the last
TRIAL = 256  # the weight of one trial
# Above this weight, a row's counts are halved. A drafter's limit is 16 times as high.
MEMORY = 24 * TRIAL
PRIOR = 4 * TRIAL  # weight of the drafter's overall rate in the estimate for a row
FIRST_HITS, FIRST_TRIALS = 3 * TRIAL, 4 * TRIAL  # assumed counts of a drafter without trials
ARRAYS = ("hits", "trials", "drafter_hits", "drafter_trials")


class Acceptance:
    """Counts of hits and trials, in units of 1/TRIAL. The arrays are indexed by [drafter, row] or
    [drafter].
    """

    def __init__(self, num_rows: int):
        self.hits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.trials = np.zeros((DRAFTERS, num_rows), np.int32)
        self.drafter_hits = np.zeros(DRAFTERS, np.int64)
        self.drafter_trials = np.zeros(DRAFTERS, np.int64)
        # verified drafts that were passed to `judge` and not counted yet
        self._unread: list[tuple[np.ndarray, ...]] = []

    def admit(self, row: int) -> None:
        """Forget the row's counts, because another request has the row now."""
        self.count()
        self.hits[:, row] = self.trials[:, row] = 0

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """Record the verified drafts for `rows` (intp [m]). `count` later adds the drafts to the counts.

        `drafters`: each row's drafter number. `drafted`: each row's draft count, 0 for none. `counts`: how
        many tokens each row got, as the bytes of int32 [m].
        """
        self._unread.append((rows, drafters, drafted, np.frombuffer(counts, np.int32)))

    def count(self) -> None:
        """Count the recorded drafts."""
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
        """Halve the counts that exceed their limit, so that newer trials have more weight."""
        for hits, trials, memory in (
            (self.hits, self.trials, MEMORY),
            (self.drafter_hits, self.drafter_trials, 16 * MEMORY),
        ):
            old = trials > memory
            if old.any():
                hits[old] >>= 1
                trials[old] >>= 1

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return each drafter's acceptance probability in `rows`, in 1/65536: int64 [drafters, n]."""
        usual = (self.drafter_hits + FIRST_HITS) * ONE // (self.drafter_trials + FIRST_TRIALS)
        hits = self.hits[:, rows].astype(np.int64) * ONE + usual[:, None] * PRIOR
        return hits // (self.trials[:, rows] + PRIOR)

    def before_last(self) -> list[int]:
        """Return the indices of drafters that have trials, in descending order, without the highest index.
        Call `count` before this method.
        """
        return self.drafter_trials.nonzero()[0][-2::-1].tolist()


def powers(chances: np.ndarray, most: int) -> np.ndarray:
    """Return each probability's powers from 1 to `most`, in 1/65536 like `chances`: int64 [most, ...]."""
    table = np.empty((most, *chances.shape), np.int64)
    table[0] = chances
    for depth in range(1, most):
        table[depth] = table[depth - 1] * chances >> 16
    return table
