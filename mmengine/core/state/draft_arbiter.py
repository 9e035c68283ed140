"""What arbiters of drafts have in common: the ways that there are, and what is known of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.state.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.step_cost import ONE, StepCosts

ALL_DRAFTERS, NO_DRAFTERS = DRAFTERS - 1, -1  # up to which number drafters are level
NO_BUCKET = -1
NO_LIMITS = np.zeros((0, 0), np.int32)
WINDOW = 16  # steps between looks, where nobody comes
SETTLED = 32  # steps for which drafts stay off, and a batch that drains goes on as it was
MAX_EMPTY = 4  # steps in which nobody has any drafts, which say that there are none
_COUNTERS = (
    *("steps", "bucket", "num_rows", "level", "until_review", "rest_steps", "was_off", "has_arrivals"),
    *(
        "has_limits",
        "has_tried_limits",
        "full_bucket",
        "reviewed_bucket",
        "turned_off_at",
        "empty_steps",
        "times_plain",
    ),
)
Waits = dict[int, tuple[int, int]]


class SavedGoodput(msgspec.Struct, array_like=True):
    """An arbiter as a snapshot has it."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    levels: dict[int, int]
    waits: Waits
    costs: tuple[dict[int, list[int]], list[tuple[int, int, list[tuple[int, int, int, int]]]], dict[int, int]]


class DraftArbiter(ABC):
    """Columns are [drafter, row] or [drafter]. Only `evolve` calls what changes. `overlaps`: steps behind
    which drafters are level are awaited, and others need not be; so to be level costs time, drafts or not."""

    def __init__(self, num_rows: int, most: int, *, overlaps: bool):
        self._most, self._overlaps = most, overlaps
        self.acceptance, self.costs = Acceptance(num_rows), StepCosts()
        self.levels: dict[int, int] = {}  # by bucket, as decided last
        self.waits: Waits = {}  # by bucket: what a trial cost, and when the next one is due
        self.draft_limits = np.full((DRAFTERS, num_rows), most, np.int32)
        self.steps = 0
        self.bucket, self.num_rows = NO_BUCKET, 0  # of the last step that only decoded; rows of the last one
        self.level = ALL_DRAFTERS  # the way that is taken: up to which number drafters are level
        self.until_review = 0  # steps until the next look
        self.rest_steps = 0  # steps that go without drafts to come
        self.was_off = False  # nobody was level, and nobody had drafts, in the last step
        self.has_arrivals = True  # somebody, since the last step that only decoded
        self.has_limits = False  # some row has less room than there may be
        self.has_tried_limits = False  # whether fewer drafts pay where all of them do not
        # Buckets: of a batch that does not drain, and at the last look.
        self.full_bucket, self.reviewed_bucket = NO_BUCKET, NO_BUCKET
        self.turned_off_at = 0  # the step in which drafts were
        self.empty_steps = 0  # steps, one after the other, in which somebody was level and nobody had drafts
        self.times_plain = True  # what steps without drafts take

    def admit(self, row: int) -> None:
        """The row is another request's."""
        self.has_arrivals = True
        self.acceptance.admit(row)
        self.draft_limits[:, row] = self._most

    def draft_level_after(self, num_rows: int) -> int:
        """Up to which number drafters are level behind a step of so many rows that is decided now."""
        return NO_DRAFTERS if self.rest_steps else self._level_for(num_rows)

    def draft_limits_of(self, rows: ReadOnlyArray) -> np.ndarray | None:
        """int32 [drafters, n]: the most drafts that `rows` may have; [0, 0]: none; None: what there is."""
        level = self.draft_level_after(len(rows))
        if level == NO_DRAFTERS:
            return NO_LIMITS
        if level == ALL_DRAFTERS and not self.has_limits:
            return None
        room = self.draft_limits[:, rows]
        room[level + 1 :] = 0
        return room

    def count_step(self, num_rows: int, has_drafts: bool, ns: int, level: int | None = None) -> bool:
        """Count a step that ran, in `ns`. True where it needs no look. `level`: see `ran`."""
        self.steps += 1
        self.until_review -= 1
        if (
            has_drafts
            or self.has_arrivals
            or self.rest_steps
            or self.until_review <= 0
            or num_rows != self.num_rows
        ):
            return False
        if self.level != NO_DRAFTERS:
            self.empty_steps += 1
            return self.empty_steps > MAX_EMPTY and (not self._overlaps or level == NO_DRAFTERS)
        return not self.times_plain

    def judge(self, rows: np.ndarray, drafters: np.ndarray, drafted: np.ndarray, counts: bytes) -> None:
        """See Acceptance."""
        self.acceptance.judge(rows, drafters, drafted, counts)

    def record_step(
        self,
        rows: np.ndarray,
        drafts: int,
        tokens: int,
        made: int,
        ns: int,
        only_decodes: bool,
        level: int | None = None,
        reading_ns: int = 0,
    ) -> None:
        """A step of `rows` verified `drafts`, gave `tokens`, and `made` drafts for the next, all in `ns`.
        `only_decodes`: it computed nothing else; where it did, reading that for drafts took `reading_ns`.
        `level`: who was, behind it, where it was decided before the last step had run; None: who is now."""
        num_rows, was_off = len(rows), self.was_off
        level = self.draft_level_after(num_rows) if level is None else level
        is_off = level == NO_DRAFTERS
        self.was_off = is_off and only_decodes and not drafts  # the first step behind prompts is a slow one
        if drafts or made:
            self.empty_steps = 0
        if only_decodes and num_rows:
            bucket = StepCosts.bucket(num_rows)
            if self.was_off and was_off:
                self.costs.add_plain(bucket, num_rows, ns)
            elif not is_off and (drafts or self._overlaps):
                self.costs.add_drafted(bucket, self.level, num_rows, drafts, tokens, ns)
            elif self.empty_steps == MAX_EMPTY and self.level < ALL_DRAFTERS:
                self.costs.add_failure(bucket, self.level)
                self.until_review = 0
            self.times_plain = self.costs.wants_plain(bucket)
            self._after(bucket, rows)
        else:
            self.rest_steps = max(self.rest_steps - 1, 0)
        self.num_rows = num_rows

    def saved(self) -> SavedGoodput:
        self.acceptance.count()
        return SavedGoodput(
            {name: int(getattr(owner, name)) for owner, name in self._counters()},
            {name: array.tobytes() for name, array in self._arrays()},
            dict(self.levels),
            dict(self.waits),
            self.costs.saved(),
        )

    def restore(self, saved: SavedGoodput) -> None:
        """Raises ValueError, KeyError for what `saved` did not give."""
        for owner, name in self._counters():
            setattr(owner, name, type(getattr(owner, name))(saved.counters[name]))
        for name, array in self._arrays():
            array[:] = np.frombuffer(saved.arrays[name], array.dtype).reshape(array.shape)
        self.levels = dict(saved.levels)
        self.waits.clear()
        self.waits.update(saved.waits)
        self.costs.restore(*saved.costs)

    def digest(self) -> bytes:
        return msgspec.msgpack.encode(self.saved())

    def _counters(self) -> Iterator[tuple[object, str]]:
        """What is saved of integers: whose, and by which name."""
        return ((self, name) for name in _COUNTERS)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "draft_limits", self.draft_limits
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    @abstractmethod
    def _level_for(self, num_rows: int) -> int:
        """The way of a step of so many rows."""

    def _after(self, bucket: int, rows: np.ndarray) -> None:
        """A step of so many rows only decoded: decide which way to take, if it calls for that."""
        has_arrivals, other, self.bucket = self.has_arrivals, bucket != self.bucket, bucket
        self.has_arrivals = False
        if has_arrivals:
            self.full_bucket = bucket
        elif other and self.level == NO_DRAFTERS:
            self.until_review = min(self.until_review, SETTLED)
        if self.rest_steps:
            self.rest_steps -= 1
            if self.rest_steps:
                return
            self.until_review = 0
        self._decide(rows, has_arrivals or self.until_review <= 0)

    @abstractmethod
    def _decide(self, rows: np.ndarray, is_due: bool) -> None:
        """Behind a step of `rows` that only decoded, and that nobody rests from. `is_due`: somebody
        has_arrivals, or it was long since."""

    def _begin_review(self) -> None:
        """The next look is a window away, and what rows' drafts did by now is counted."""
        if self.bucket == self.reviewed_bucket:
            self.full_bucket = self.bucket  # it does not drain
        self.reviewed_bucket, self.until_review = self.bucket, WINDOW
        self.acceptance.count()
        self.acceptance.fade()

    def _rate(self, level: int) -> int | None:
        """Tokens per time of a way, beside none; None: not known."""
        return self.costs.rate(self.bucket, level)

    def _limit(self, rows: np.ndarray) -> bool:
        """Give `rows` room for the drafts that are likely enough. True where that must be seen before it is
        decided whether drafts pay."""
        least = self.costs.least_chance(self.bucket, self.level)
        if not least:
            return False
        room = (powers(self.acceptance.of_rows(rows), self._most) >= least).sum(axis=0, dtype=np.int32)
        known = self.acceptance.drafter_trials > 0
        were, are = int(self.draft_limits[known][:, rows].sum()), int(room[known].sum())
        self.draft_limits[:, rows] = room
        self.has_limits = bool((room < self._most).any())
        rate = self._rate(self.level)
        if self.has_tried_limits or 4 * are > 3 * were or rate is None or rate >= ONE:
            return False
        self.has_tried_limits = True
        self.costs.forget_drafted(self.bucket)
        return True
