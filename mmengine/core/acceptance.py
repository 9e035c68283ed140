"""How likely drafts are kept, and how many of those asked for there are: of each row, and of each drafter.

A trial is a draft whose place was reached: those kept, and the first that was not.
"""

import numpy as np

from mmengine.core.step_cost import ONE

DRAFTERS = 8  # numbers that are told apart; those beyond count as the last one
TRIAL = 256  # what one trial adds
MEMORY = 24 * TRIAL  # trials of a row, and of a drafter 16 times as many, at which older ones fade
PRIOR = 4 * TRIAL  # trials that the drafter's own share counts for in a row's
FIRST_HITS, FIRST_TRIALS = 3 * TRIAL, 4 * TRIAL  # of a drafter that was never judged
ARRAYS = (
    *("hits", "trials", "given", "asked", "last", "usual"),
    *("drafter_hits", "drafter_trials", "drafter_given", "drafter_asked"),
)


class Acceptance:
    """Columns are [drafter, row] or [drafter]."""

    def __init__(self, num_rows: int):
        self.hits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.trials = np.zeros((DRAFTERS, num_rows), np.int32)
        self.given = np.zeros((DRAFTERS, num_rows), np.int32)  # drafts
        self.asked = np.zeros((DRAFTERS, num_rows), np.int32)
        self.last = np.full(num_rows, -1, np.int32)  # who drafted for the row last
        self.drafter_hits, self.drafter_trials, self.drafter_given, self.drafter_asked = (
            np.zeros(DRAFTERS, np.int64) for _ in range(4)
        )
        self.usual = self.last.copy()  # the same when it was decided last
        self._unread: list[tuple[np.ndarray, ...]] = []  # what was judged, to be counted together

    def admit(self, row: int) -> None:
        """What was judged must be counted."""
        for column in (self.hits, self.trials, self.given, self.asked):
            column[:, row] = 0
        self.last[row] = self.usual[row] = -1

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """Of rows (intp [m]) `drafted` drafts, or none, were verified; each gave `counts` tokens, int32."""
        self._unread.append((rows, drafters, drafted, np.frombuffer(counts, np.int32)))

    def count(self, room: np.ndarray, asked: int) -> None:
        """Count what was judged; when this is done is all the same. Drafters up to `asked` were asked for as
        many drafts as there was `room`."""
        if not self._unread:
            return
        rows, drafters, drafted, counts = map(np.concatenate, zip(*self._unread, strict=True))
        self._unread.clear()
        has_some = drafted > 0
        drafters = np.where(has_some, drafters.clip(0, DRAFTERS - 1), self.usual[rows])
        known = (drafters >= 0) & ((drafters <= asked) | has_some)
        rows, drafters, drafted, counts = rows[known], drafters[known], drafted[known], counts[known]
        self.last[rows[has_some[known]]] = drafters[has_some[known]]
        accepted = np.minimum(counts - 1, drafted).clip(0)
        hits = accepted * TRIAL
        sums = (hits, hits + (accepted < drafted) * TRIAL, drafted * TRIAL, room[drafters, rows] * TRIAL)
        places = (drafters, rows)
        columns = (self.hits, self.trials, self.given, self.asked)
        totals = (self.drafter_hits, self.drafter_trials, self.drafter_given, self.drafter_asked)
        for column, total, values in zip(columns, totals, sums, strict=True):
            np.add.at(column, places, values)
            np.add.at(total, drafters, values)

    def had_none(self, rows: np.ndarray, asked: int, drafts: int) -> None:
        """Drafter number `asked` was asked for `drafts` of each of `rows`, and there were none."""
        self.asked[asked, rows] += drafts * TRIAL
        self.drafter_asked[asked] += len(rows) * drafts * TRIAL

    def have_drafts(self, rows: np.ndarray, asked: int) -> bool:
        """Whether drafters up to number `asked` had any for `rows`."""
        return bool(self.trials[: asked + 1, rows].any())

    def fade(self) -> None:
        """What was long ago counts less, and who drafted last for a row counts as who is asked for it."""
        self.usual[:] = self.last
        for part, whole, memory in (
            (self.hits, self.trials, MEMORY),
            (self.given, self.asked, 4 * MEMORY),
            (self.drafter_hits, self.drafter_trials, 16 * MEMORY),
            (self.drafter_given, self.drafter_asked, 64 * MEMORY),
        ):
            old = whole > memory
            if old.any():
                part[old] >>= 1
                whole[old] >>= 1

    def of_drafters(self) -> np.ndarray:
        """How likely a draft of each is kept, in 1/65536: int64 [drafters]."""
        return (self.drafter_hits + FIRST_HITS) * ONE // (self.drafter_trials + FIRST_TRIALS)

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """The same of each row: int64 [drafters, n]."""
        hits = self.hits[:, rows].astype(np.int64) * ONE + self.of_drafters()[:, None] * PRIOR
        return hits // (self.trials[:, rows] + PRIOR)

    def share_given(self, rows: np.ndarray) -> np.ndarray:
        """Of the drafts asked for, those there are, in 1/65536: int64 [drafters, n]."""
        own = (self.drafter_given + PRIOR) * ONE // (self.drafter_asked + PRIOR)
        given = self.given[:, rows].astype(np.int64) * ONE + own[:, None] * PRIOR
        return np.minimum(given // (self.asked[:, rows] + PRIOR), ONE)

    def drafters_of(self, rows: np.ndarray, asked: int) -> np.ndarray:
        """Who would draft for each row, if drafters up to number `asked` may: who did last, else who drafts
        most."""
        last = self.last[rows]
        return np.minimum(np.where(last < 0, int(np.argmax(self.drafter_trials)), last), asked)

    def highest(self) -> int:
        """The highest number that drafted; -1: nobody did."""
        seen = self.drafter_trials.nonzero()[0]
        return int(seen[-1]) if len(seen) else -1


def powers(chances: np.ndarray, most: int) -> np.ndarray:
    """chance, chance^2, …, in 1/65536: int64 [most, ...]."""
    table = np.empty((most, *chances.shape), np.int64)
    table[0] = chances
    for depth in range(1, most):
        table[depth] = table[depth - 1] * chances >> 16
    return table
