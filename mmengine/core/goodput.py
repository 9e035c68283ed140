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

from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.step_cost import ONE, StepCosts

PROBE_DRAFTS, PROBE_SHARE = 2, 8  # drafts of one row in so many
PROBE_STEPS = 8  # for which a probe waits for drafts
AT_FIRST, SOONEST, LATEST = 4, 32, 1024  # steps between probes: while costs are not known, and later
RARELY = 256  # steps with drafts between two without
WINDOW = 16  # steps with drafts between decisions, where they agree
JUDGED = 8  # steps with drafts after which what was decided must have paid
NOBODY = np.zeros((0, 0), np.int32)
_COUNTERS = (
    *("is_on", "offered", "probing", "resting", "bucket", "countdown", "patience", "since_decided"),
    *("window", "since_plain", "tokens_on", "plain_on", "time_on", "steps_on", "num_probes"),
)
_ARRAYS = ("limits", "room", "starting")


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
        self.acceptance = Acceptance(num_rows)
        self.limits = np.zeros((DRAFTERS, num_rows), np.int32)
        self.room = np.zeros((DRAFTERS, num_rows), np.int32)
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
        self.acceptance.admit(row)
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
        """See Acceptance."""
        self.acceptance.judge(rows, drafters, drafted, accepted)
        if not self.is_on and self.acceptance.count():
            self._try_soon()

    def ran(
        self, rows: np.ndarray, drafts: int, tokens: int, ns: tuple[int, int], made: int, pure: bool
    ) -> None:
        """A step of `rows` verified `drafts`, gave `tokens` and `made` drafts for the next. `ns`: what all of
        it took, and what of that making drafts did. `pure`: it computed nothing else."""
        self.offered = made > 0
        if pure and len(rows):
            bucket = self.costs.bucket(len(rows))
            self._measure(bucket, len(rows), drafts, tokens, ns, made)
            if bucket != self.bucket:
                self._enter(bucket, rows)
        if drafts:
            self.since_decided += 1
            if self.since_decided >= self.window:
                self._reconsider(rows)
        self._probe(rows)

    def idles(self) -> bool:
        """Whether a step without drafts, when drafts do not pay, needs no look."""
        if self.is_on or self.probing or self.resting or self.countdown <= AT_FIRST:
            return False
        self.offered = False
        self.countdown -= 1
        return self.countdown & 3 != 0

    def room_of(self, rows: np.ndarray) -> np.ndarray:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0] where nobody may have any."""
        return self.room[:, rows] if self.has_room else NOBODY

    def saved(self) -> Saved:
        self.acceptance.count()
        return Saved(
            {name: int(getattr(self, name)) for name in _COUNTERS},
            {name: array.tobytes() for name, array in self._arrays()},
            self.costs.saved(),
        )

    def restore(self, saved: Saved) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for name in _COUNTERS:
            setattr(self, name, type(getattr(self, name))(saved.counters[name]))
        for name, array in self._arrays():
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.costs.restore(saved.costs)
        self.has_room = bool(self.room.any())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((name, getattr(self, name)) for name in _ARRAYS)
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _reconsider(self, rows: np.ndarray) -> None:
        is_known = self.costs.relative(self.bucket) is not None
        if is_known or not self.is_on:
            self._decide(rows)
        if not (is_known or self.is_on):
            self.patience, self.countdown = SOONEST, AT_FIRST

    def _measure(
        self, bucket: int, num_rows: int, drafts: int, tokens: int, ns: tuple[int, int], made: int
    ) -> None:
        whole, making = ns
        making = min(making, whole)
        # Who drafts again has more to do than who drafts on.
        if made and self.is_on and drafts:
            self.costs.made(bucket, made, making)
        if drafts and not self.is_on:
            self.costs.doubt(bucket)
        self.costs.ran(bucket, drafts, whole - making)
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
            self.time_on += self.costs.likely(bucket, drafts, whole)

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
        self.acceptance.count()
        self.acceptance.fade()
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
            chances, own = self.acceptance.of_rows(rows), self.acceptance.of_drafters()
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
        chances = self.acceptance.of_rows(rows)[self.acceptance.drafters_of(rows), np.arange(len(rows))]
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

    def _probe(self, rows: np.ndarray) -> None:
        """Grant a few rows without room a little of it, now and then, or take it back."""
        if self.probing:
            self.probing -= 1
            if not self.probing:  # nobody had anything to draft
                self._grant(self.limits)
                self.countdown = self.patience
                self.patience = min(2 * self.patience, LATEST)
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

    def _try_soon(self) -> None:
        self.patience = SOONEST
        self.countdown = min(self.countdown, max(SOONEST, self._probe_steps()))

    def _probe_steps(self) -> int:
        """The fewest steps between two probes that do not take too much of the time."""
        num_rows = max(1, self.limits.shape[1] // PROBE_SHARE)
        return self.costs.probe_steps(self.bucket, (PROBE_DRAFTS + self._most) // 2 * num_rows)

    def _grant(self, room: np.ndarray) -> None:
        self.room[:] = room
        self.has_room = bool(self.room.any())
