"""What arbiters of drafts have in common: the ways that there are, and what is known of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.state.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.step_cost import ONE, StepCosts

ALL, NO_DRAFTERS = DRAFTERS - 1, -1  # up to which number drafters are asked
NO_BUCKET = -1
NOBODY = np.zeros((0, 0), np.int32)
WINDOW = 16  # steps between looks, where nobody comes
SETTLED = 32  # steps for which drafts stay off, and a batch that drains goes on as it was
EMPTY = 4  # steps in which nobody has any drafts, which say that there are none
_COUNTERS = (
    *("steps", "bucket", "num_rows", "asked", "left", "resting", "was_off", "came"),
    *("limited", "limits_tried", "full", "looked", "turned_off", "empty", "watches"),
)
Waits = dict[int, tuple[int, int]]


class Saved(msgspec.Struct, array_like=True):
    """An arbiter as a snapshot has it."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    ways: dict[int, int]
    waits: Waits
    costs: tuple[dict[int, list[int]], list[tuple[int, int, list[tuple[int, int, int, int]]]], dict[int, int]]


class DraftArbiter(ABC):
    """Columns are [drafter, row] or [drafter]. Only `evolve` calls what changes. `overlaps`: steps behind
    which drafters are asked are awaited, and others need not be; so to be asked costs time, drafts or not."""

    def __init__(self, num_rows: int, most: int, *, overlaps: bool):
        self._most, self._overlaps = most, overlaps
        self.acceptance, self.costs = Acceptance(num_rows), StepCosts()
        self.ways: dict[int, int] = {}  # by bucket, as decided last
        self.waits: Waits = {}  # by bucket: what a trial cost, and when the next one is due
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
        # Buckets: of a batch that does not drain, and at the last look.
        self.full, self.looked = NO_BUCKET, NO_BUCKET
        self.turned_off = 0  # the step in which drafts were
        self.empty = 0  # steps, one after the other, in which somebody was asked and nobody had drafts
        self.watches = True  # what steps without drafts take

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.came = True
        self.acceptance.admit(row)
        self.room[:, row] = self._most

    def last_drafter_after(self, num_rows: int) -> int:
        """Up to which number drafters are asked behind a step of so many rows that is decided now."""
        return NO_DRAFTERS if self.resting else self._asked(num_rows)

    def room_of(self, rows: ReadOnlyArray) -> np.ndarray | None:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0]: none; None: what there is."""
        asked = self.last_drafter_after(len(rows))
        if asked == NO_DRAFTERS:
            return NOBODY
        if asked == ALL and not self.limited:
            return None
        room = self.room[:, rows]
        room[asked + 1 :] = 0
        return room

    def passes(self, num_rows: int, has_drafts: bool, ns: int, asked: int | None = None) -> bool:
        """Count a step that ran, in `ns`. True where it needs no look. `asked`: see `ran`."""
        self.steps += 1
        self.left -= 1
        if has_drafts or self.came or self.resting or self.left <= 0 or num_rows != self.num_rows:
            return False
        if self.asked != NO_DRAFTERS:
            self.empty += 1
            return self.empty > EMPTY and (not self._overlaps or asked == NO_DRAFTERS)
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
        reading_ns: int = 0,
    ) -> None:
        """A step of `rows` verified `drafts`, gave `tokens`, and `made` drafts for the next, all in `ns`.
        `pure`: it computed nothing else; where it did, reading that for drafts took `reading_ns`. `asked`:
        who was, behind it, where it was decided before the last step had run; None: who is now."""
        num_rows, was_off = len(rows), self.was_off
        asked = self.last_drafter_after(num_rows) if asked is None else asked
        is_off = asked == NO_DRAFTERS
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
        else:
            self.resting = max(self.resting - 1, 0)
        self.num_rows = num_rows

    def saved(self) -> Saved:
        self.acceptance.count()
        return Saved(
            {name: int(getattr(owner, name)) for owner, name in self._counters()},
            {name: array.tobytes() for name, array in self._arrays()},
            dict(self.ways),
            dict(self.waits),
            self.costs.saved(),
        )

    def restore(self, saved: Saved) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for owner, name in self._counters():
            setattr(owner, name, type(getattr(owner, name))(saved.counters[name]))
        for name, array in self._arrays():
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.ways = dict(saved.ways)
        self.waits.clear()
        self.waits.update(saved.waits)
        self.costs.restore(*saved.costs)

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _counters(self) -> Iterator[tuple[object, str]]:
        """What is saved of integers: whose, and by which name."""
        return ((self, name) for name in _COUNTERS)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "room", self.room
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    @abstractmethod
    def _asked(self, num_rows: int) -> int:
        """The way of a step of so many rows."""

    def _after(self, bucket: int, rows: np.ndarray) -> None:
        """A step of so many rows only decoded: decide which way to take, if it calls for that."""
        came, other, self.bucket = self.came, bucket != self.bucket, bucket
        self.came = False
        if came:
            self.full = bucket
        elif other and self.asked == NO_DRAFTERS:
            self.left = min(self.left, SETTLED)
        if self.resting:
            self.resting -= 1
            if self.resting:
                return
            self.left = 0
        self._decide(rows, came or self.left <= 0)

    @abstractmethod
    def _decide(self, rows: np.ndarray, is_due: bool) -> None:
        """Behind a step of `rows` that only decoded, and that nobody rests from. `is_due`: somebody came, or
        it was long since."""

    def _note_look(self) -> None:
        """The next look is a window away, and what rows' drafts did by now is counted."""
        if self.bucket == self.looked:
            self.full = self.bucket  # it does not drain
        self.looked, self.left = self.bucket, WINDOW
        self.acceptance.count()
        self.acceptance.fade()

    def _rate(self, asked: int) -> int | None:
        """Tokens per time of a way, beside none; None: not known."""
        return self.costs.rate(self.bucket, asked)

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
        rate = self._rate(self.asked)
        if self.limits_tried or 4 * are > 3 * were or rate is None or rate >= ONE:
            return False
        self.limits_tried = True
        self.costs.forget_drafted(self.bucket)
        return True
