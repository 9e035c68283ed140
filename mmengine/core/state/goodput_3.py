"""The arbiter of logs of decision version 3 and before.

As goodput.py, which is the one of today, but drafts were on until they were seen to lose, for the first time
and every 512 to 8,192 steps; they stayed on while they gave no more than a sixteenth less than none; and
what reading prompts took was not counted.
"""

import numpy as np

from mmengine.core.state.draft_arbiter import ALL, NOBODY_ASKED, SETTLED, DraftArbiter
from mmengine.core.state.step_cost import ONE, StepCosts

AT_FIRST = 3  # steps between looks while it is not known what drafts give
REST = 8  # steps without drafts, so that their time is known; the first still verifies some
RARELY = 512  # steps with drafts between rests
SOONEST, LATEST = 512, 8192  # steps without drafts before all are asked again
CLEARLY = ONE + ONE // 4  # what drafts give, beside none, where no other way is looked for
STAYS = 16  # a way that is taken counts as better by one part in so many


class Goodput3(DraftArbiter):
    """See DraftArbiter. `waits`: how many steps pass before all are asked again, and when they have."""

    def _asked(self, num_rows: int) -> int:
        """The way of a step of so many rows: where somebody came, what was best for as many."""
        if not self.came or self.steps - self.turned_off < SETTLED:
            return self.asked
        return self.ways.get(StepCosts.bucket(num_rows), self.asked)

    def _decide(self, rows: np.ndarray, is_due: bool) -> None:
        if is_due:
            self._look(rows)

    def _look(self, rows: np.ndarray) -> None:
        """Decide which way to take."""
        self._note_look()
        if self.asked == NOBODY_ASKED:
            if self.steps - self.turned_off < SETTLED or self.bucket != self.full:
                self.left = SETTLED
                return
            if self.steps >= self._tried_again():
                self.costs.forget_drafted(self.bucket)
        elif self.bucket == self.full and self._needs_rest():
            self.resting, self.left = REST, REST
            return
        elif self._limit(rows):
            return
        asked = self._best_way()
        if asked == NOBODY_ASKED:
            if self.asked != NOBODY_ASKED:
                self._turn_off()
            self.left = max(1, min(self._tried_again() - self.steps, RARELY))
        elif self.asked == NOBODY_ASKED:
            self.limited = False
            self.room[:] = self._most
        if asked != NOBODY_ASKED and self.costs.rate(self.bucket, asked) is None:
            self.left = AT_FIRST
        self.asked = self.ways[self.bucket] = asked

    def _needs_rest(self) -> bool:
        """Whether what a step without drafts takes should be seen (again)."""
        knows = self.costs.knows_plain(self.bucket)
        return not knows or self.costs.since_plain.get(self.bucket, 0) >= RARELY

    def _best_way(self) -> int:
        best, found = ONE + (ONE // STAYS if self.asked == NOBODY_ASKED else 0), NOBODY_ASKED
        for asked in (ALL, *self.acceptance.before_last()):
            rate = self.costs.rate(self.bucket, asked)
            if rate is None:
                return asked if found == NOBODY_ASKED or best < CLEARLY else found
            rate += rate // STAYS if asked == self.asked else 0
            if rate > best:
                best, found = rate, asked
        return found

    def _tried_again(self) -> int:
        """The step from which on all are asked again."""
        return self.waits.get(self.bucket, (0, 0))[1]

    def _turn_off(self) -> None:
        """The longer drafts were on, the sooner they are tried again."""
        patience, tried = self.waits.get(self.bucket, (SOONEST // 2, self.steps - RARELY))
        was_long = self.steps - tried > RARELY
        patience = SOONEST if was_long else min(2 * patience, LATEST)
        self.turned_off, self.waits[self.bucket] = self.steps, (patience, self.steps + patience)
