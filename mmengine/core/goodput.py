"""Who drafts, and how many drafts of each row: those that give the most tokens per time.

A fold over what steps were measured to cost and how many drafts they kept, in integers alone, so that a log
gives the same choices again. Each row has, for each drafter, an estimate p of how likely its next draft is
kept; draft j of it is then kept with p^j. Step costs come from the steps with as many rows that ran
(core/step_cost.py). Drafts are taken by falling p^j while the expected tokens over the time of the step grow;
the chance of the last one taken is what a draft needs. It is decided for each number of rows by itself, and
stands for some steps. Drafters are asked by rising numbers: all of them, or, where the last ones do not pay,
those before them.

What is not known is tried: at first everybody drafts, and a few steps without follow. Where drafting does not
pay, somebody drafts now and then, best one who has just come, the more rarely the less it helped.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.step_cost import MEMORY, ONE, SIXTEENTH, StepCosts

ALL, NOBODY_ASKED = DRAFTERS - 1, -1  # up to which number drafters are asked
NEVER = ONE + 1  # the chance that no draft has
NOBODY = np.zeros((0, 0), np.int32)
QUIET = 64  # steps between looks while nobody has anything to draft
WINDOW, AT_FIRST = 16, 3  # steps between decisions while drafts are on, and while costs are not known
REST = 8  # steps without drafts, of which the first still verifies some
RARELY, SOONER = 256, 24  # measured steps with drafts between rests; where no step without was seen yet
PROBE, PROBED = 32, 7  # steps that a probe waits for drafts, and of these what one with drafts counts
SOONEST, LATEST = 64, 8192  # steps without drafts before a probe
COLD = 64  # an engine's first steps, which are slow
PATIENT = 4  # times as long a probe waits for somebody who comes
EVERY = 8  # one row in so many is probed where nobody came
NUMBERS = 16  # of drafts are compared
CLEARLY = ONE + ONE // 4  # what drafts give, beside none, where that needs no second look
KEEP, CHANGE = ONE, ONE + ONE // 32  # what drafts must give, beside none, to stay on and to be turned on
_COUNTERS = (
    *("steps", "bucket", "left", "resting", "probing", "probed", "num_probes", "due", "patience", "probe_at"),
    *("arm", "same", "num_rows", "watches", "limited", "judged", "paused"),
)
_ARRAYS = ("room", "starting")


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """For a number of rows: up to which number drafters are asked, what chance a draft needs (0: any), the
    step of the decision, and what it gives, where 65536 is without drafts."""

    asked: int
    least: int
    step: int
    rate: int = 0


OFF = Verdict(NOBODY_ASKED, NEVER, 0)


class Saved(msgspec.Struct, array_like=True):
    """A Goodput as a snapshot has it."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    verdicts: dict[int, Verdict]
    times: list[tuple[int, int, list[tuple[int, int]]]]
    since_plain: dict[int, int]


class Goodput:
    """Columns are [drafter, row] or [drafter]. Only `evolve` calls what changes."""

    def __init__(self, num_rows: int, most: int):
        self._most, self._all = most, np.full((DRAFTERS, num_rows), most, np.int32)
        self.acceptance = Acceptance(num_rows)
        self.costs = StepCosts()
        self.verdicts: dict[int, Verdict] = {}  # by bucket
        self.room = np.zeros((DRAFTERS, num_rows), np.int32)  # where not everybody may draft freely
        self.starting = np.full(DRAFTERS, most, np.int32)  # room of a row of which nothing is known
        self.steps = 0
        self.bucket, self.num_rows = -1, 0  # of the last step
        self.left = 0  # steps until the next look
        self.resting = 0  # steps that go without drafts to come
        self.probing, self.probed = 0, 0  # what is left of a probe, and how many rows it asks for
        self.num_probes, self.due = 0, 0  # `due`: the next one who comes is probed
        self.patience, self.probe_at = SOONEST, 0  # steps between probes, and when one is due
        self.watches = False  # what steps without drafts take, one after the other
        self.judged = False  # drafts were, since it was decided last
        self.paused = False  # drafts are, and nobody came since
        self.limited = False  # whether `room` was asked for
        self.arm, self.same = ALL, 0  # who was asked in the last step, and in how many before it

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.paused = False
        self._count()
        self.acceptance.admit(row)
        if self.due and not self.probing:
            self._begin_probe([row])
        elif self.probing and self.probed < self.num_rows // EVERY + 1:
            self._grant([row])
        else:
            self.room[:, row] = 0 if self.probing else self.starting

    def room_of(self, rows: np.ndarray) -> np.ndarray | None:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0]: none; None: what there is."""
        if self.resting:
            return NOBODY
        if self.probing:
            return self.room[:, rows]
        verdict = self._verdict(StepCosts.bucket(len(rows)))
        if verdict is None or not verdict.least:
            return None
        if verdict.asked == NOBODY_ASKED:
            return NOBODY
        room = self.room[:, rows]
        room[verdict.asked + 1 :] = 0  # who came since then has some
        return room

    def passes(self, num_rows: int, has_drafts: bool) -> bool:
        """Count a step that ran. True where it needs no look: it neither verified drafts nor made some."""
        self.steps += 1
        self.left -= 1
        if has_drafts or self.left <= 0 or num_rows != self.num_rows:
            return False
        return not (self.resting or self.probing or self.watches)

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """See Acceptance."""
        self.judged = True
        self.acceptance.judge(rows, drafters, drafted, counts)

    def ran(self, rows: np.ndarray, drafts: int, made: int, ns: tuple[int, int], pure: bool) -> None:
        """A step of `rows` verified `drafts` and `made` some for the next. `ns`: what all of it took, and
        what of that making drafts did. `pure`: it computed nothing else."""
        num_rows = len(rows)
        bucket, same_rows, self.num_rows = StepCosts.bucket(num_rows), num_rows == self.num_rows, num_rows
        arm = self._asked(bucket)
        verdict = self._verdict(bucket)
        limited = bool(self.probing or verdict and verdict.least)
        self.same = self.same + 1 if arm == self.arm else 0
        if not self.same or limited != self.limited:
            self._count()
            self.arm, self.limited = arm, limited
        if pure and num_rows:
            if self.same and (drafts or same_rows) and not (self.probing and self.probed < num_rows):
                self._measure(bucket, num_rows, drafts, made, ns)
            self.watches = arm == NOBODY_ASKED and self.costs.wants_plain(bucket)
            if bucket != self.bucket:
                self._enter(bucket, rows)
            elif self.left <= 0 and not (self.resting or self.probing):
                self._look(rows)
        if self.resting or self.probing:
            self._wait(drafts, rows)

    def saved(self) -> Saved:
        self._count()
        return Saved(
            {name: int(getattr(self, name)) for name in _COUNTERS},
            {name: array.tobytes() for name, array in self._arrays()},
            dict(self.verdicts),
            *self.costs.saved(),
        )

    def restore(self, saved: Saved) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for name in _COUNTERS:
            setattr(self, name, type(getattr(self, name))(saved.counters[name]))
        for name, array in self._arrays():
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.verdicts = dict(saved.verdicts)
        self.costs.restore(saved.times, saved.since_plain)

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from ((name, getattr(self, name)) for name in _ARRAYS)
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    def _asked(self, bucket: int) -> int:
        """Up to which number drafters are asked in a step with so many rows."""
        if self.resting:
            return NOBODY_ASKED
        if self.probing:
            return ALL
        verdict = self._verdict(bucket)
        return ALL if verdict is None else verdict.asked

    def _verdict(self, bucket: int) -> Verdict | None:
        """What holds for so many rows; until that was looked at, what held last. Who drafts again must first
        read what it missed, which a small gain is not worth while a batch drains."""
        verdict = self.verdicts.get(bucket) or self.verdicts.get(self.bucket)
        if self.paused and verdict is not None and 0 < verdict.rate < CLEARLY:
            return OFF
        return verdict

    def _count(self) -> None:
        self.acceptance.count(self.room if self.limited else self._all, max(self.arm, 0))

    def _measure(self, bucket: int, num_rows: int, drafts: int, made: int, ns: tuple[int, int]) -> None:
        whole, making = ns[0], min(ns[1], ns[0])
        self.costs.computed(bucket, num_rows, drafts, whole - making)
        if made and self.arm >= 0:
            self.costs.made(bucket, num_rows, self.arm, made, making)

    def _enter(self, bucket: int, rows: np.ndarray) -> None:
        """As many rows as now are another matter."""
        self.bucket = bucket
        if self.resting or self.probing:
            return
        verdict = self.verdicts.get(bucket)
        if verdict is None or self.steps - verdict.step >= RARELY:
            self._look(rows)
        else:
            self._count()
            self._rule(self._verdict(bucket), rows)

    def _wait(self, drafts: int, rows: np.ndarray) -> None:
        """Another step of a rest or a probe is over."""
        if self.resting:
            self.resting -= 1
        else:
            self.probing = max(0, self.probing - (PROBED if drafts else 1))
        if self.resting or self.probing:
            return
        was_probed, self.probed = self.probed > 0, 0
        if len(rows):
            self._look(rows)
        if was_probed:
            self.patience = min(2 * self.patience, LATEST)
            self.probe_at = self.steps + self.patience

    def _look(self, rows: np.ndarray) -> None:
        """Decide again, and whether to rest or to probe."""
        was = self.verdicts.get(self.bucket)
        was_asked = ALL if was is None else was.asked
        is_off = was_asked == NOBODY_ASKED
        tries = is_off and self.arm == NOBODY_ASKED and self.steps >= self.probe_at
        if tries and self.patience < LATEST:
            self._probe(rows)
            return
        if self.arm == was_asked != ALL and was_asked >= 0 and not self.judged:
            self.acceptance.had_none(rows, was_asked, WINDOW * self._most)
        elif was is not None and not (tries or self.judged):
            self.left = max(1, self.probe_at - self.steps) if is_off else QUIET
            return
        self.judged = False
        self._count()
        self.acceptance.fade()
        if tries:
            self.costs.forget_drafted(self.bucket)
            verdict = Verdict(ALL, 0, self.steps)
        else:
            verdict = self._decide(rows, is_off)
        self.verdicts[self.bucket] = verdict
        verdict = self._verdict(self.bucket)
        if verdict.asked == NOBODY_ASKED and not is_off:
            self.patience = SOONEST if self._could_pay() else LATEST
            self.probe_at = self.steps + self.patience
        self._rule(verdict, rows)
        if verdict.asked != NOBODY_ASKED and self._needs_rest(verdict):
            self.resting = REST

    def _needs_rest(self, verdict: Verdict) -> bool:
        """Whether what a step without drafts takes should be seen (again)."""
        costs, bucket = self.costs, self.bucket
        if costs.drafted_speaker(bucket) is None:
            return False
        if costs.plain_speaker(bucket) is None:
            return True
        is_sure = verdict.rate > CLEARLY and costs.plain_speaker(bucket) == bucket
        return costs.since_plain.get(bucket, 0) >= (RARELY if is_sure else SOONER)

    def _rule(self, verdict: Verdict, rows: np.ndarray) -> None:
        """`verdict` holds from now on for `rows`."""
        self.paused = verdict.asked == NOBODY_ASKED
        if self.paused:
            self.left = max(1, self.probe_at - self.steps)
            self.starting[:] = 0
            return
        if self.costs.speaker(self.bucket) is not None:
            self.left = WINDOW if verdict.asked == ALL else AT_FIRST
        elif self.left <= 0:  # else what is seen with other numbers of rows counts too
            self.left = AT_FIRST
        self.due = 0
        self.starting[:] = self._most
        if verdict.least:
            acceptance = self.acceptance
            self.starting[:] = (powers(acceptance.of_drafters(), self._most) >= verdict.least).sum(axis=0)
            limits = (powers(acceptance.of_rows(rows), self._most) >= verdict.least).sum(axis=0)
            limits[verdict.asked + 1 :] = self.starting[verdict.asked + 1 :] = 0
            self.room[:, rows] = limits

    def _decide(self, rows: np.ndarray, is_off: bool) -> Verdict:
        speaker = self.costs.speaker(self.bucket)
        if speaker is None:
            return Verdict(ALL, 0, self.steps - RARELY)
        best, found = CHANGE if is_off else KEEP, Verdict(NOBODY_ASKED, NEVER, self.steps)
        for asked in self._arms():
            if asked != ALL and found.asked == ALL and not self.acceptance.have_drafts(rows, asked):
                continue
            rate, least = self._best_of(rows, speaker, asked)
            if rate > best + (best >> 6) * (found.asked >= 0):
                best, found = rate, Verdict(asked, least, self.steps, rate)
        if found.asked == NOBODY_ASKED and self.steps < COLD and self.costs.num_drafted(speaker) < MEMORY:
            return Verdict(ALL, 0, self.steps - RARELY)
        return found

    def _best_of(self, rows: np.ndarray, speaker: int, asked: int) -> tuple[int, int]:
        """The most tokens per time that drafters up to number `asked` can give, where 65536 is without
        them, and the chance that a draft then needs."""
        acceptance, most, num_rows = self.acceptance, self._most, len(rows)
        drafters, columns = acceptance.drafters_of(rows, asked), np.arange(num_rows)
        worth = powers(acceptance.of_rows(rows)[drafters, columns], most).ravel()
        there = np.tile(acceptance.share_given(rows)[drafters, columns], most)
        order = np.argsort(-worth, kind="stable")
        worth, there = worth[order], there[order]
        gains, drafts = np.cumsum(worth * there >> 16), np.cumsum(there)
        curve, rates = self.costs.curve(speaker, asked), []
        places = range(len(worth) - 1, -1, -max(1, len(worth) // NUMBERS))
        for last in places:
            cost = curve.at(int(drafts[last]) * SIXTEENTH // (num_rows * ONE))
            rates.append((num_rows * ONE + int(gains[last])) * ONE // (num_rows * cost))
        best = max(rates)
        if rates[0] + (rates[0] >> 4) >= best:  # all of them, unless fewer give clearly more
            return rates[0], 0 if asked == ALL else 1
        return best, max(1, int(worth[places[rates.index(best)]]))

    def _could_pay(self) -> bool:
        """Whether drafts that are all kept would be worth what they take."""
        curves = [self.costs.curve(self.costs.speaker(self.bucket), asked) for asked in self._arms()]
        levels = range(1, self._most + 1)
        return any((a_row + 1) * ONE > curve.at(a_row * SIXTEENTH) for curve in curves for a_row in levels)

    def _arms(self) -> tuple[int, ...]:
        """Up to which numbers drafters may be asked: all, or those before the last ones."""
        return (ALL, *range(self.acceptance.highest() - 1, -1, -1))

    def _probe(self, rows: np.ndarray) -> None:
        """Drafts have been off for long: who comes next is asked for some, or in the end somebody else."""
        if not self.due:
            self.due, self.left = 1, PATIENT * self.patience
            self.probe_at = self.steps + self.left
            return
        self.num_probes += 1
        self._begin_probe(rows[self.num_probes % min(EVERY, len(rows)) :: EVERY].tolist())

    def _begin_probe(self, rows: list[int]) -> None:
        self._count()
        self.due, self.probing, self.probed = 0, PROBE, 0
        self.room[:] = 0
        self._grant(rows)

    def _grant(self, rows: list[int]) -> None:
        self.room[:, rows] = self._most
        self.probed += len(rows)
