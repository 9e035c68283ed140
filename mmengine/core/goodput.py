"""How many drafts of each row are worth verifying: as many as give the most tokens per time.

A fold over what steps were measured to cost and how many drafts they kept, in integers alone, so that a log
gives the same numbers again. Each row has, for each drafter, an estimate p of how likely its next draft is
kept; draft j of it is then kept with p^j. A step of n rows that verifies d drafts takes a + b d; both come
from the steps with as many rows that ran (core/step_cost.py). Drafts are taken by falling p^j while the
expected tokens over that time grow; where no number of them beats a step without, none is. The limits that
follow hold until enough was seen to decide again.

Where nothing is drafted, a few rows draft a little now and then, the more rarely the less it helped; where
always something is, a step without now and then says what that takes.
"""

import msgspec
import numpy as np

from mmengine.core.step_cost import ONE, StepCosts

DRAFTERS = 8  # numbers that are told apart; those beyond count as the last one
TRIAL = 256  # what one draft that was judged adds
MEMORY = 24 * TRIAL  # trials of a row, and of a drafter 16 times as many, at which older ones fade
PRIOR = 4 * TRIAL  # trials that the drafter's own share of hits counts for in a row's
FIRST_HITS, FIRST_TRIALS = 3 * TRIAL, 4 * TRIAL  # of a drafter that was never judged
PROBE_DRAFTS, PROBE_SHARE = 2, 8  # drafts of one row in so many
PROBE_STEPS = 16  # for which a probe waits for drafts
AT_FIRST, SOONEST, LATEST = 4, 32, 1024  # steps between probes: while costs are not known, and later
RARELY = 256  # steps with drafts between two without
WINDOW = 16  # steps with drafts between decisions, where they agree
JUDGED = 8  # steps with drafts after which what was decided must have paid
NOBODY = np.zeros((0, 0), np.int32)
_COUNTERS = (
    *("is_on", "offered", "probing", "resting", "bucket", "countdown", "patience", "since_decided"),
    *("window", "since_plain", "tokens_on", "plain_on", "time_on", "steps_on", "num_probes"),
)
_ARRAYS = ("hits", "trials", "last", "limits", "room", "drafter_hits", "drafter_trials", "starting")


class Saved(msgspec.Struct, array_like=True):
    """A Goodput as a snapshot has it."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    costs: dict[int, tuple[int, ...]]


class Goodput:
    """Columns are [drafter, row] or [drafter]. Only `evolve` calls what changes. `room`: most drafts of each
    row by number of the drafter, as granted for now; `limits`: as decided."""

    def __init__(self, num_rows: int, most: int):
        self._most = most
        self.hits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.trials = np.zeros((DRAFTERS, num_rows), np.int32)
        self.limits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.room = np.zeros((DRAFTERS, num_rows), np.int32)
        self.last = np.full(num_rows, -1, np.int32)  # whose drafts of the row were judged last
        self.drafter_hits = np.zeros(DRAFTERS, np.int64)
        self.drafter_trials = np.zeros(DRAFTERS, np.int64)
        self.starting = np.zeros(DRAFTERS, np.int32)  # limits of a row of which nothing is known
        self.costs = StepCosts()
        self.is_on = False  # drafts pay with as many rows as ran last
        self.offered = False  # drafts stand behind known tokens
        self.probing, self.resting = 0, False  # steps that a probe still waits; a step without is due
        self.bucket = -1  # of the last step that only decoded
        self.countdown, self.patience = AT_FIRST, SOONEST  # steps to the next probe, and between two
        self.num_probes = 0
        self.since_decided, self.window, self.since_plain = 0, 1, 0  # steps with drafts
        # Since drafts were decided to pay: tokens given, tokens that steps without had given, and time.
        self.tokens_on = self.plain_on = self.time_on = self.steps_on = 0
        self.has_room = False

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.hits[:, row] = self.trials[:, row] = 0
        self.last[row] = -1
        self._try_soon()  # what is said now may be easier to guess
        self.limits[:, row] = self.starting
        if not self.probing and not self.resting:
            self.room[:, row] = self.starting
            self.has_room = self.has_room or bool(self.starting.any())

    def verifying(self) -> None:
        """Drafts are in the open step: a probe has what it waited for."""
        if 0 < self.probing < PROBE_STEPS:  # not those of the step that was running when it began
            self.probing = 0
            self._grant(self.limits)

    def judge(
        self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Of rows (intp [m]) `drafted` drafts, one or more each, were verified, and `accepted` kept."""
        drafters = np.clip(drafters, 0, DRAFTERS - 1)
        hits = accepted * TRIAL
        trials = hits + (accepted < drafted) * TRIAL
        if not self.is_on and (accepted == drafted).all() and self._doubts(int(drafters[0])):
            self._try_soon()  # better than thought
        self.hits[drafters, rows] += hits
        self.trials[drafters, rows] += trials
        np.add.at(self.drafter_hits, drafters, hits)
        np.add.at(self.drafter_trials, drafters, trials)
        self.last[rows] = drafters

    def ran(
        self, rows: np.ndarray, drafts: int, tokens: int, ns: tuple[int, int], made: int, pure: bool
    ) -> None:
        """A step of `rows` verified `drafts`, gave `tokens` and `made` drafts for the next. `ns`: what all of
        it took, and what of that making drafts did. `pure`: it computed nothing else."""
        self.offered = made > 0
        if drafts:
            self.since_decided += 1
        if pure and len(rows):
            self._measure(len(rows), drafts, tokens, ns, made)
            bucket = self.costs.bucket(len(rows))
            if bucket != self.bucket:
                self._enter(bucket, rows)
        is_known = self.costs.relative(self.bucket) is not None
        if self.since_decided >= self.window and (is_known or not self.is_on):
            self._decide(rows)
        if drafts and not (is_known or self.is_on):
            self.patience, self.countdown = SOONEST, AT_FIRST
        self._probe(rows)

    def room_of(self, rows: np.ndarray) -> np.ndarray:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0] where nobody may have any."""
        return self.room[:, rows] if self.has_room else NOBODY

    def saved(self) -> Saved:
        return Saved(
            {name: int(getattr(self, name)) for name in _COUNTERS},
            {name: getattr(self, name).tobytes() for name in _ARRAYS},
            self.costs.saved(),
        )

    def restore(self, saved: Saved) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for name in _COUNTERS:
            setattr(self, name, type(getattr(self, name))(saved.counters[name]))
        for name in _ARRAYS:
            array = getattr(self, name)
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.costs.restore(saved.costs)
        self.has_room = bool(self.room.any())

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _measure(self, num_rows: int, drafts: int, tokens: int, ns: tuple[int, int], made: int) -> None:
        whole, making = ns
        making = min(making, whole)
        if made:
            self.costs.made(num_rows, made, making)
        if drafts and not self.is_on:
            self.costs.doubt(num_rows)
        self.costs.ran(num_rows, drafts, whole - making)
        if not drafts:
            self.since_plain = 0
            if self.resting:
                self.resting = False
                self._grant(self.limits)
            return
        self.since_plain += 1
        if self.is_on:
            self.steps_on += 1
            self.tokens_on += tokens
            self.plain_on += num_rows
            self.time_on += whole

    def _enter(self, bucket: int, rows: np.ndarray) -> None:
        """As many rows as now are another matter."""
        self.bucket = bucket
        self.patience = SOONEST
        self.countdown = SOONEST if self.costs.relative(bucket) else AT_FIRST
        self._forget_pay()
        self._decide(rows)

    def _forget_pay(self) -> None:
        self.tokens_on = self.plain_on = self.time_on = self.steps_on = 0

    def _decide(self, rows: np.ndarray) -> None:
        self.since_decided = 0
        self._fade()
        least = self._least_chance(rows)
        was_on, self.is_on = self.is_on, least > 0
        if was_on != self.is_on:
            self._forget_pay()
            if not self.is_on:
                self.patience = min(2 * self.patience, LATEST)
                self.countdown = self.patience
        self.window = min(2 * self.window, WINDOW) if self.is_on else 1
        if not least:
            self.limits[:] = self.starting[:] = 0
        else:
            own = self._drafter_chances()
            chances = self._chances(rows, own)
            self.limits[:, rows] = (powers(chances, self._most) >= least).sum(axis=0)
            self.starting[:] = (powers(own, self._most) >= least).sum(axis=0)
        if not self.probing and not self.resting:
            self._grant(self.limits)

    def _least_chance(self, rows: np.ndarray) -> int:
        """What a draft's chance must be, in 1/65536, for it to be worth its time; 0: no draft is."""
        shape = self.costs.relative(self.bucket)
        if shape is None or not len(rows) or self._did_not_pay():
            return 0
        base, each = shape
        own = self._drafter_chances()
        drafters = np.where(self.last[rows] < 0, int(np.argmax(self.drafter_trials)), self.last[rows])
        chances = self._chances(rows, own)[drafters, np.arange(len(rows))]
        falling = np.sort(powers(chances, self._most).ravel())[::-1]
        tokens = len(rows) * ONE + np.cumsum(falling)
        rates = tokens * ONE // (base + each * np.arange(1, len(falling) + 1))
        best, plain = int(np.argmax(rates)), len(rows) * ONE
        better = plain + (plain >> (7 if self.is_on else 5))
        return max(1, int(falling[best])) if int(rates[best]) > better else 0

    def _did_not_pay(self) -> bool:
        """Whether steps with drafts, since they were decided for, gave less than steps without had."""
        without = self.costs.plain_ns(self.bucket)
        if self.steps_on < JUDGED or not without:
            return False
        failed = self.tokens_on * without * self.steps_on < self.plain_on * self.time_on
        if not failed:
            self.patience = SOONEST
        self._forget_pay()
        return failed

    def _drafter_chances(self) -> np.ndarray:
        return (self.drafter_hits + FIRST_HITS) * ONE // (self.drafter_trials + FIRST_TRIALS)

    def _chances(self, rows: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Of each drafter and row, how likely its next draft is kept, in 1/65536: int64 [drafters, n]."""
        hits = self.hits[:, rows].astype(np.int64) * ONE + own[:, None] * PRIOR
        return hits // (self.trials[:, rows] + PRIOR)

    def _fade(self) -> None:
        """What was long ago counts less."""
        for hits, trials, memory in (
            (self.hits, self.trials, MEMORY),
            (self.drafter_hits, self.drafter_trials, 16 * MEMORY),
        ):
            old = trials > memory
            if old.any():
                hits[old] >>= 1
                trials[old] >>= 1

    def _probe(self, rows: np.ndarray) -> None:
        """Grant a few rows without room a little of it, now and then, or take it back."""
        if self.probing:
            self.probing -= 1
            if not self.probing:
                self._grant(self.limits)
            return
        self.countdown -= 1
        if self.since_plain >= RARELY and not self.resting:
            self.resting = True
            self._grant(np.zeros_like(self.limits))
        if self.countdown > 0 or self.resting or not len(rows):
            return
        every = min(len(rows), PROBE_SHARE)
        picked = rows[self.num_probes // 2 % every :: every]
        closed = self.limits[:, picked] == 0
        self.num_probes += 1
        if self.costs.relative(self.bucket) is None:
            self.countdown = AT_FIRST
        else:
            self.countdown = max(self.patience, self._probe_steps())
            self.patience = self.patience if self.is_on else min(2 * self.patience, LATEST)
        if closed.any():
            self.probing = PROBE_STEPS
            granted = self.limits.copy()
            # By turns: from one number alone nobody could tell what a draft takes from what drafting does.
            drafts = self._most if self.num_probes & 1 else min(PROBE_DRAFTS, self._most)
            granted[:, picked] = np.where(closed, drafts, granted[:, picked])
            self._grant(granted)

    def _doubts(self, drafter: int) -> bool:
        return bool(2 * self.drafter_hits[drafter] < self.drafter_trials[drafter])

    def _try_soon(self) -> None:
        self.patience = SOONEST
        self.countdown = min(self.countdown, max(SOONEST, self._probe_steps()))

    def _probe_steps(self) -> int:
        """The fewest steps between two probes that do not take too much of the time."""
        num_rows = max(1, len(self.last) // PROBE_SHARE)
        return self.costs.probe_steps(self.bucket, (PROBE_DRAFTS + self._most) // 2 * num_rows)

    def _grant(self, room: np.ndarray) -> None:
        self.room[:] = room
        self.has_room = bool(self.room.any())


def powers(chances: np.ndarray, most: int) -> np.ndarray:
    """chance, chance^2, …, in 1/65536: int64 [most, ...]."""
    table = np.empty((most, *chances.shape), np.int64)
    table[0] = chances
    for depth in range(1, most):
        table[depth] = table[depth - 1] * chances >> 16
    return table
