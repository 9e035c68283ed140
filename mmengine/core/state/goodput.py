"""Chooses the drafters and each row's number of drafts, to maximise goodput (accepted tokens per time). The
name and the aim come from SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large Language
Models Using Goodput", arXiv 2406.14066). SmartSpec predicts goodput from acceptance rates and a linear model
of step times. This module measures goodput, and predicts only how many drafts a row accepts.

All inputs are logged times and tokens, and all arithmetic uses integers. A replay therefore makes the same
choices. A draft level says which drafters draft: none, all, or all except the last ones. Goodput is measured
per level and per bucket (a range of batch sizes), over the last few steps (step_cost.py). The time in which
drafters read prompts is included (prompt_cost.py). Within a level, a row drafts only tokens that are likely
to be accepted. The estimated probability for draft j is p^j, with p per row and drafter.

A trial turns drafts on, to measure whether drafts save time compared with the preceding steps. A trial that
loses too much time ends immediately. The larger the loss, the longer the wait before the next trial
(draft_trials.py). A loss at one batch size is also assumed for larger batches, and a gain for smaller
batches.

A level change costs time, because a new drafter must first read the tokens so far. The level is therefore
reviewed only when requests arrive, and every few steps. A shrinking batch keeps its level.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state import draft_trials, prompt_cost
from mmengine.core.state.draft_arbiter import ALL_DRAFTERS, NO_BUCKET, NO_DRAFTERS, SETTLED, DraftArbiter
from mmengine.core.state.draft_trials import DraftTrials
from mmengine.core.state.prompt_cost import PromptCost
from mmengine.core.state.step_cost import ONE, StepCosts, rows_of

FEW = 8  # in batches of at most this many rows, all drafters draft until there are measurements
AT_FIRST = 3  # number of steps between reviews while the goodput of drafts is unknown
# Length in steps of a rest, a pause in drafting. The first step still verifies earlier drafts.
REST = 8
RARELY, OFTEN = 128, 64  # steps with drafts between rests: RARELY if drafts gain clearly, else OFTEN
CLEARLY = ONE + ONE // 4  # relative goodput that is a clear gain; then no unmeasured level is tried
LONGEST = 512  # maximum number of steps between reviews
IN_VAIN = 8  # a trial ends if no row gets drafts in its first IN_VAIN steps
# A trial must be better than no drafts by 1/MORE. A new level must be better than the current level by
# 1/STAYS.
MORE, STAYS = 16, 16


class Goodput(DraftArbiter):
    """Chooses draft levels by measured goodput. `waits`: as in DraftTrials."""

    def __init__(self, num_rows: int, most: int, *, overlaps: bool = False):
        super().__init__(num_rows, most, overlaps=overlaps)
        self.prompts, self.trials = PromptCost(), DraftTrials(self.waits)
        self.level, self.turned_off_at = NO_DRAFTERS, -SETTLED
        # The bucket in which steps without drafts are timed again before the next trial.
        self.retimed_bucket = NO_BUCKET

    def admit(self, row: int) -> None:
        super().admit(row)
        self.prompts.admit()

    def draft_level_after(self, num_rows: int) -> int:
        rests = self.rest_steps and not self._is_another_batch(num_rows)
        return NO_DRAFTERS if rests else self._level_for(num_rows)

    def count_step(self, num_rows: int, has_drafts: bool, ns: int, level: int | None = None) -> bool:
        self.trials.count_step(ns)
        self.prompts.tokens += num_rows
        needs_none = super().count_step(num_rows, has_drafts, ns, level)
        return needs_none and self.level == NO_DRAFTERS

    def _counters(self) -> Iterator[tuple[object, str]]:
        yield from super()._counters()
        yield self, "retimed_bucket"
        yield from ((self.prompts, name) for name in prompt_cost.COUNTERS)
        yield from ((self.trials, name) for name in draft_trials.COUNTERS)

    def _level_for(self, num_rows: int) -> int:
        """Return the level for a step with `num_rows` rows. After arrivals, the level is the bucket's known
        or presumed level.
        """
        if not self.has_arrivals or self.steps - self.turned_off_at < SETTLED:
            return self.level
        bucket = StepCosts.bucket(num_rows)
        if self.trials.waits_for(bucket):
            return NO_DRAFTERS
        return self.levels[bucket] if bucket in self.levels else self._presumed(bucket)

    def _is_another_batch(self, num_rows: int) -> bool:
        """Return whether arrivals have more than doubled the batch. A rest then ends, because drafters can
        read prompts only when requests arrive.
        """
        return self.has_arrivals and num_rows > 2 * self.num_rows

    def _presumed(self, bucket: int) -> int:
        """Return the level for a bucket without measurements: the level of the next larger bucket with
        drafts. Without such a bucket, all drafters draft in small batches, and none in large batches.
        """
        larger = [other for other, way in self.levels.items() if other > bucket and way != NO_DRAFTERS]
        if larger:
            return self.levels[min(larger)]
        few = rows_of(bucket) <= FEW and not self.trials.steps_left(bucket, 1)
        return ALL_DRAFTERS if few else NO_DRAFTERS

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
        num_rows = len(rows)
        if self._is_another_batch(num_rows):
            self.rest_steps = 0
        if not (only_decodes and num_rows):
            self.prompts.read(reading_ns)
        else:
            bucket = StepCosts.bucket(num_rows)
            if self.has_arrivals:
                self._enter(bucket, self._level_for(num_rows))
            is_off = (self.draft_level_after(num_rows) if level is None else level) == NO_DRAFTERS
            if drafts or not is_off:
                self._record_drafted(bucket, num_rows, drafts, made, tokens, ns)
        super().record_step(rows, drafts, tokens, made, ns, only_decodes, level, reading_ns)

    def _enter(self, bucket: int, level: int) -> None:
        """Switch to `level`, the bucket's known or presumed level, after requests joined the batch."""
        if level != NO_DRAFTERS and self.level == NO_DRAFTERS:
            self._turn_on()
            self.trials.begin(is_proven=(self.costs.rate(bucket, level) or 0) > ONE)
        self.level = level

    def _record_drafted(
        self, bucket: int, num_rows: int, drafts: int, made: int, tokens: int, ns: int
    ) -> None:
        """Record a decode-only step with drafts, or with active drafters."""
        self.prompts.tokens += max(tokens - num_rows, 0)
        plain_ns = self.costs.plain_ns(bucket, num_rows)
        if plain_ns:
            ns = self.costs.capped_ns(bucket, self.level, num_rows, drafts, ns)
            beside_ns = self.prompts.ns_a_token() * tokens if drafts else 0
            self.trials.record(drafts, made, ns + beside_ns, plain_ns * tokens // num_rows, plain_ns)

    def _decide(self, rows: np.ndarray, is_due: bool) -> None:
        plain_ns = self.costs.plain_ns(self.bucket, len(rows))
        if self.level != NO_DRAFTERS and self.empty_steps >= IN_VAIN and not self.trials.num_drafted:
            self.trials.end(self.bucket, plain_ns, soonest=0)
            self.level, self.until_review = NO_DRAFTERS, SETTLED
        elif self.level != NO_DRAFTERS and plain_ns and self.trials.failed(plain_ns):
            self._fail(plain_ns)
        elif is_due:
            self._review(rows, plain_ns)

    def _fail(self, plain_ns: int) -> None:
        """End a trial that lost too much time. If the batch has shrunk since the last review, the loss counts
        for the bucket that the batch had before (`full_bucket`).
        """
        if self.bucket == self.full_bucket:
            self.acceptance.count()
            self.costs.add_failure(self.bucket, self.level)
            self._choose(plain_ns)
            return
        drained, self.bucket = self.bucket, self.full_bucket
        self._turn_off(self.costs.plain_ns(self.full_bucket, rows_of(self.full_bucket)) or plain_ns)
        self.bucket = drained

    def _review(self, rows: np.ndarray, plain_ns: int) -> None:
        """Begin a trial, begin a rest, or choose the best level."""
        self._begin_review()
        if self.level == NO_DRAFTERS:
            self._try(plain_ns)
            return
        if self.bucket == self.full_bucket and self._needs_rest():
            self.costs.forget_plain(self.bucket)  # old times may be wrong for the current requests
            self.rest_steps, self.until_review = REST, REST
            return
        if self._limit(rows):
            return
        self._choose(plain_ns)

    def _choose(self, plain_ns: int) -> None:
        level = self._best_level()
        if level == NO_DRAFTERS:
            self._turn_off(plain_ns)
            return
        if self._rate(level) is None:
            self.until_review = AT_FIRST
        else:
            self.trials.succeed(self.bucket)
        if level != self.level:
            self.trials.continue_trial()
        self.level = self.levels[self.bucket] = level

    def _try(self, plain_ns: int) -> None:
        """Begin a trial with all drafters, if due. The time per step without drafts must be known."""
        self.until_review = SETTLED
        if self.steps - self.turned_off_at < SETTLED or self.bucket != self.full_bucket:
            return
        left = self.trials.steps_left(self.bucket, plain_ns or 1)
        if left:
            self.until_review = min(left, LONGEST)
            return
        if self.retimed_bucket != self.bucket:
            self.costs.forget_plain(self.bucket)
            self.retimed_bucket, self.times_plain = self.bucket, True
        if not self.costs.knows_plain(self.bucket, itself=True):
            self.until_review = REST
            return
        self.costs.forget_drafted(self.bucket)
        self._turn_on()
        self.trials.begin()
        self.level = self.levels[self.bucket] = ALL_DRAFTERS
        self.until_review = AT_FIRST

    def _turn_on(self) -> None:
        self.retimed_bucket, self.has_limits, self.empty_steps = NO_BUCKET, False, 0
        self.draft_limits[:] = self._most

    def _turn_off(self, plain_ns: int) -> None:
        if self.bucket != self.full_bucket:
            self.trials.begin()  # resets the loss, which belongs to a batch with more rows
        self.trials.end(self.bucket, plain_ns)
        self.level = self.levels[self.bucket] = NO_DRAFTERS
        self.turned_off_at, self.until_review, self.retimed_bucket = self.steps, SETTLED, NO_BUCKET

    def _needs_rest(self) -> bool:
        """Return whether steps without drafts must be measured, for the first time or again."""
        if not self.costs.knows_plain(self.bucket):
            return True
        rate = self._rate(self.level)
        rests = OFTEN if rate is not None and rate < CLEARLY else RARELY
        return self.costs.since_plain.get(self.bucket, 0) >= rests

    def _rate(self, level: int) -> int | None:
        return self.costs.rate(self.bucket, level, self.prompts.ns_a_token())

    def _best_level(self) -> int:
        """Return the level with the best goodput, or a level without measurements. A level with drafts must
        have better goodput than no drafts. Until a trial has proved a gain, the goodput must be better by
        1/MORE.
        """
        least, best, found = ONE if self.trials.is_proven else ONE + ONE // MORE, 0, NO_DRAFTERS
        for level in (ALL_DRAFTERS, *self.acceptance.before_last()):
            rate = self._rate(level)
            if rate is None:
                return level if found == NO_DRAFTERS or best < CLEARLY else found
            value = rate + (rate // STAYS if level == self.level else 0)
            if rate > least and value > best:
                best, found = value, level
        return found
