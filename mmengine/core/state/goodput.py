"""Who drafts, and how many drafts of each row: what was measured to give the most tokens per time.

The name and the aim are those of goodput in SmartSpec (Liu et al., "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput", arXiv 2406.14066): tokens that are kept, per time. There it is
predicted by a linear model of a step's time and by acceptance rates; here what a way to draft gives is
measured, and only how many drafts a row has is computed from how likely each is kept.

A fold over what steps took and how many tokens they gave, in integers alone, so that a log gives the same
choices again. For each number of rows there are several ways: nobody is asked, all drafters are, or, where
several draft, only those before the last ones. What a way gives is known from the last few steps that took it
(step_cost.py); one that nothing is known of is tried. Within a way each row has as many drafts as are
likely enough to be kept: draft j of a row is, with p^j, where p is estimated for each row and drafter.

To change the way costs time: a head that was not asked must first read what it missed. So it is looked at
when requests come, then every few steps; a batch that drains goes on as it was; and the way that is taken
stays until another is clearly better. Where nobody is asked, all are asked again for a few steps now and
then, the more rarely the less it helped.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.state.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.step_cost import ONE, StepCosts

ALL, NOBODY_ASKED = DRAFTERS - 1, -1  # up to which number drafters are asked
NO_BUCKET = -1
NOBODY = np.zeros((0, 0), np.int32)
WINDOW, AT_FIRST = 16, 3  # steps between looks, where nobody comes; while it is not known what drafts give
REST = 8  # steps without drafts, so that their time is known; the first still verifies some
RARELY = 512  # steps with drafts between rests
SETTLED = 32  # steps for which drafts stay off, and a batch that drains goes on as it was
EMPTY = 4  # steps in which nobody has any drafts, which say that there are none
SOONEST, LATEST = 512, 8192  # steps without drafts before all are asked again
CLEARLY = ONE + ONE // 4  # what drafts give, beside none, where no other way is looked for
STAYS = 16  # a way that is taken counts as better by one part in so many
_COUNTERS = (
    *("steps", "bucket", "num_rows", "asked", "left", "resting", "was_off", "came"),
    *("limited", "limits_tried", "full", "looked", "turned_off", "empty", "watches"),
)


class Saved(msgspec.Struct, array_like=True):
    """A Goodput as a snapshot has it."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    ways: dict[int, int]
    waits: dict[int, tuple[int, int]]
    costs: tuple[dict[int, list[int]], list[tuple[int, int, list[tuple[int, int, int, int]]]], dict[int, int]]


class Goodput:
    """Columns are [drafter, row] or [drafter]. Only `evolve` calls what changes. `overlaps`: steps behind
    which drafters are asked are awaited, and others need not be; so to be asked costs time, drafts or not."""

    def __init__(self, num_rows: int, most: int, *, overlaps: bool = False):
        self._most, self._overlaps = most, overlaps
        self.acceptance = Acceptance(num_rows)
        self.costs = StepCosts()
        self.ways: dict[int, int] = {}  # by bucket, as decided last
        self.room = np.full((DRAFTERS, num_rows), most, np.int32)
        self.steps = 0
        self.bucket, self.num_rows = NO_BUCKET, 0  # of the last step that only decoded; rows of the last one
        self.asked = ALL  # the way that is taken: up to which number drafters are asked
        self.left = 0  # steps until the next look
        self.resting = 0  # steps that go without drafts to come
        self.was_off = False  # nobody was asked, and nobody had drafts, in the last step
        self.came = True  # somebody, since the last step that only decoded
        self.limited = False  # some row has less room than there may be
        self.limits_tried = False  # whether fewer drafts pay where all of them do not
        self.full, self.looked = (
            NO_BUCKET,
            NO_BUCKET,
        )  # buckets: of a batch that does not drain, and at the last look
        self.turned_off = 0  # the step in which drafts were
        # By bucket: how many steps pass before all are asked again, and when these have passed.
        self.waits: dict[int, tuple[int, int]] = {}
        self.empty = 0  # steps, one after the other, in which somebody was asked and nobody had drafts
        self.watches = True  # what steps without drafts take

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.came = True
        self.acceptance.admit(row)
        self.room[:, row] = self._most

    def asked_behind(self, num_rows: int) -> int:
        """Up to which number drafters are asked behind a step of so many rows that is decided now."""
        return NOBODY_ASKED if self.resting else self._asked(num_rows)

    def room_of(self, rows: ReadOnlyArray) -> np.ndarray | None:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0]: none; None: what there is."""
        asked = self.asked_behind(len(rows))
        if asked == NOBODY_ASKED:
            return NOBODY
        if asked == ALL and not self.limited:
            return None
        room = self.room[:, rows]
        room[asked + 1 :] = 0
        return room

    def passes(self, num_rows: int, has_drafts: bool, asked: int | None = None) -> bool:
        """Count a step that ran. True where it needs no look. `asked`: see `ran`."""
        self.steps += 1
        self.left -= 1
        if has_drafts or self.came or self.resting or self.left <= 0 or num_rows != self.num_rows:
            return False
        if self.asked != NOBODY_ASKED:
            self.empty += 1
            return self.empty > EMPTY and (not self._overlaps or asked == NOBODY_ASKED)
        return not self.watches

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """See Acceptance."""
        self.acceptance.judge(rows, drafters, drafted, counts)

    def ran(
        self,
        rows: np.ndarray,
        drafts: int,
        tokens: int,
        made: int,
        ns: int,
        pure: bool,
        asked: int | None = None,
    ) -> None:
        """A step of `rows` verified `drafts`, gave `tokens`, and `made` drafts for the next, all in `ns`.
        `pure`: it computed nothing else. `asked`: who was, behind it, where it was decided before the last
        step had run; None: who is now."""
        num_rows, was_off = len(rows), self.was_off
        asked = self.asked_behind(num_rows) if asked is None else asked
        is_off = asked == NOBODY_ASKED
        self.was_off = is_off and pure and not drafts  # the first step behind prompts is a slow one
        if drafts or made:
            self.empty = 0
        if pure and num_rows:
            bucket = StepCosts.bucket(num_rows)
            if self.was_off and was_off:
                self.costs.plain(bucket, num_rows, ns)
            elif not is_off and (drafts or self._overlaps):
                self.costs.drafted(bucket, self.asked, num_rows, drafts, tokens, ns)
            elif self.empty == EMPTY and self.asked < ALL:
                self.costs.had_none(bucket, self.asked)
                self.left = 0
            self.watches = self.costs.wants_plain(bucket)
            self._after(bucket, rows)
        elif self.resting:
            self.resting -= 1
        self.num_rows = num_rows

    def saved(self) -> Saved:
        self.acceptance.count()
        return Saved(
            {name: int(getattr(self, name)) for name in _COUNTERS},
            {name: array.tobytes() for name, array in self._arrays()},
            dict(self.ways),
            dict(self.waits),
            self.costs.saved(),
        )

    def restore(self, saved: Saved) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for name in _COUNTERS:
            setattr(self, name, type(getattr(self, name))(saved.counters[name]))
        for name, array in self._arrays():
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.ways, self.waits = dict(saved.ways), dict(saved.waits)
        self.costs.restore(*saved.costs)

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "room", self.room
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    def _asked(self, num_rows: int) -> int:
        """The way of a step of so many rows: where somebody came, what was best for as many."""
        if not self.came or self.steps - self.turned_off < SETTLED:
            return self.asked
        return self.ways.get(StepCosts.bucket(num_rows), self.asked)

    def _after(self, bucket: int, rows: np.ndarray) -> None:
        """Look, if a step of so many rows calls for it."""
        came, other, self.bucket = self.came, bucket != self.bucket, bucket
        self.came = False
        if came:
            self.full = bucket
        elif other and self.asked == NOBODY_ASKED:
            self.left = min(self.left, SETTLED)
        if self.resting:
            self.resting -= 1
            if self.resting:
                return
            self.left = 0
        if came or self.left <= 0:
            self._look(rows)

    def _look(self, rows: np.ndarray) -> None:
        """Decide which way to take."""
        if self.bucket == self.looked:
            self.full = self.bucket  # it does not drain
        self.looked, self.left = self.bucket, WINDOW
        self.acceptance.count()
        self.acceptance.fade()
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

    def _limit(self, rows: np.ndarray) -> bool:
        """Give `rows` room for the drafts that are likely enough. True where that must be seen before it is
        decided whether drafts pay."""
        least = self.costs.least_chance(self.bucket, self.asked)
        if not least:
            return False
        room = (powers(self.acceptance.of_rows(rows), self._most) >= least).sum(axis=0, dtype=np.int32)
        known = self.acceptance.drafter_trials > 0
        were, are = int(self.room[known][:, rows].sum()), int(room[known].sum())
        self.room[:, rows] = room
        self.limited = bool((room < self._most).any())
        rate = self.costs.rate(self.bucket, self.asked)
        if self.limits_tried or 4 * are > 3 * were or rate is None or rate >= ONE:
            return False
        self.limits_tried = True
        self.costs.forget_drafted(self.bucket)
        return True

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
