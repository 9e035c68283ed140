"""The base class for draft arbiters. A draft arbiter decides in each step which drafters draft, and limits
each row's draft count.

At draft level n, drafters 0 to n are active. The levels go from NO_DRAFTERS to ALL_DRAFTERS. The draft level
is chosen in periodic reviews. A bucket groups similar batch sizes (step_cost.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import msgspec
import numpy as np

from mmengine.core.state.acceptance import ARRAYS, DRAFTERS, Acceptance, powers
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.step_cost import ONE, StepCosts

ALL_DRAFTERS, NO_DRAFTERS = DRAFTERS - 1, -1  # draft levels
NO_BUCKET = -1
NO_LIMITS = np.zeros((0, 0), np.int32)
WINDOW = 16  # number of steps between reviews while no request arrives
# Minimum number of steps without drafts after drafting is turned off. Also the maximum number of steps
# between a batch change and the next review.
SETTLED = 32
MAX_EMPTY = 4  # after this many consecutive steps in which drafters find nothing, the level has failed
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
    """An arbiter's state in a snapshot."""

    counters: dict[str, int]
    arrays: dict[str, bytes]
    levels: dict[int, int]
    waits: Waits
    costs: tuple[dict[int, list[int]], list[tuple[int, int, list[tuple[int, int, int, int]]]], dict[int, int]]


class DraftArbiter(ABC):
    """Chooses a draft level for each step, and limits each row's draft count.

    Arrays are indexed by [drafter, row] or [drafter]. Only `evolve` calls methods that change the arbiter.
    `overlaps`: whether steps overlap. Drafters must wait for the step's result, so with overlap, drafters
    cost time even if they find no drafts.
    """

    def __init__(self, num_rows: int, most: int, *, overlaps: bool):
        self._most, self._overlaps = most, overlaps
        self.acceptance, self.costs = Acceptance(num_rows), StepCosts()
        self.levels: dict[int, int] = {}  # bucket -> the level that was chosen last
        self.waits: Waits = {}  # bucket -> (time lost in the last trial, time of the next trial), in ns
        self.draft_limits = np.full((DRAFTERS, num_rows), most, np.int32)
        self.steps = 0
        # The bucket of the last decode-only step, and the number of rows in the last step.
        self.bucket, self.num_rows = NO_BUCKET, 0
        self.level = ALL_DRAFTERS  # the current draft level
        self.until_review = 0  # number of steps until the next review
        self.rest_steps = 0  # number of coming steps in which drafting is off
        self.was_off = False  # whether drafting was off in the last step, and the step verified no drafts
        self.has_arrivals = True  # whether a request was admitted since the last decode-only step
        self.has_limits = False  # whether some row may have fewer drafts than the setting allows
        self.has_tried_limits = False  # whether lower draft limits were tried after drafting lost time
        # The bucket of the last batch that was not shrinking, and the bucket of the last review.
        self.full_bucket, self.reviewed_bucket = NO_BUCKET, NO_BUCKET
        self.turned_off_at = 0  # number of the step in which drafts were turned off
        self.empty_steps = 0  # number of consecutive steps in which drafters were active but found nothing
        self.times_plain = True  # whether the times of steps without drafts are measured

    def admit(self, row: int) -> None:
        """Forget the row's counts, because another request has the row now."""
        self.has_arrivals = True
        self.acceptance.admit(row)
        self.draft_limits[:, row] = self._most

    def draft_level_after(self, num_rows: int) -> int:
        """Return the draft level after the open step, which has `num_rows` rows."""
        return NO_DRAFTERS if self.rest_steps else self._level_for(num_rows)

    def draft_limits_of(self, rows: ReadOnlyArray) -> np.ndarray | None:
        """Return each drafter's draft limit for `rows`, int32 [drafters, n].

        An array with shape [0, 0] means no drafts, and None means no limit.
        """
        level = self.draft_level_after(len(rows))
        if level == NO_DRAFTERS:
            return NO_LIMITS
        if level == ALL_DRAFTERS and not self.has_limits:
            return None
        room = self.draft_limits[:, rows]
        room[level + 1 :] = 0
        return room

    def count_step(self, num_rows: int, has_drafts: bool, ns: int, level: int | None = None) -> bool:
        """Count a step that took `ns`. Returns True if the caller may skip `record_step`. `level`: as in
        `record_step`.
        """
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
        """Record verified drafts, as `Acceptance.judge` does."""
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
        """Record a step with `rows` that took `ns`. The step verified `drafts` drafts, returned `tokens`
        tokens, and proposed `made` drafts for the next step.

        `only_decodes`: whether the step computed no prompts. `reading_ns`: time that the draft head took to
        read the step's prompts. `level`: the draft level that was decided at dispatch; None: the current
        level.
        """
        num_rows, was_off = len(rows), self.was_off
        level = self.draft_level_after(num_rows) if level is None else level
        is_off = level == NO_DRAFTERS
        # The step after a prompt is slow. So `add_plain` is called only if the previous step was off too.
        self.was_off = is_off and only_decodes and not drafts
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
        """Restore the values that `saved` returned. Raises ValueError or KeyError for invalid values."""
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
        """Yield (object, attribute name) for each integer that a snapshot contains."""
        return ((self, name) for name in _COUNTERS)

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "draft_limits", self.draft_limits
        yield from ((name, getattr(self.acceptance, name)) for name in ARRAYS)

    @abstractmethod
    def _level_for(self, num_rows: int) -> int:
        """Return the draft level for a step with `num_rows` rows."""

    def _after(self, bucket: int, rows: np.ndarray) -> None:
        """Choose the draft level after a decode-only step in this bucket, if a choice is due."""
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
        """Choose the draft level after a decode-only step with `rows`. While `rest_steps` is positive, the
        level does not change. `is_due`: whether requests arrived or a review is due.
        """

    def _begin_review(self) -> None:
        """Begin a review: count the recorded drafts, and schedule the next review after WINDOW steps."""
        if self.bucket == self.reviewed_bucket:
            self.full_bucket = self.bucket  # the batch has not shrunk since the last review
        self.reviewed_bucket, self.until_review = self.bucket, WINDOW
        self.acceptance.count()
        self.acceptance.fade()

    def _rate(self, level: int) -> int | None:
        """Return a level's token rate relative to steps without drafts (65536: equal). Returns None without
        enough measurements.
        """
        return self.costs.rate(self.bucket, level)

    def _limit(self, rows: np.ndarray) -> bool:
        """Limit `rows` to drafts that are likely enough to be accepted. Returns True if the new limits must
        be measured before the level is chosen.
        """
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
