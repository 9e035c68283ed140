"""Who drafts, and how many drafts of each row: what was measured to give the most tokens per time.

The name and the aim are those of goodput in SmartSpec (Liu et al., "Optimizing Speculative Decoding for
Serving Large Language Models Using Goodput", arXiv 2406.14066): tokens that are kept, per time. There it is
predicted by a linear model of a step's time and by acceptance rates; here what a way to draft gives is
measured, and only how many drafts a row has is computed from how likely each is kept.

A fold over what steps took and how many tokens they gave, in integers alone, so that a log gives the same
choices again. For each number of rows there are several ways: nobody is asked, all drafters are, or, where
several draft, only those before the last ones. What a way gives is known from the last few steps that took it
(step_cost.py), and from what reading prompts for it took (prompt_cost.py). Within a way each row has as many
drafts as are likely enough to be kept: draft j of a row is, with p^j, where p is estimated for each row and
drafter.

Not to lose time comes before winning some. Drafts are tried beside steps without them that ran just then; a
trial that loses too much ends at once, and there is no other until that is a small share of the time since
(draft_trials.py). Where drafts lost, they are taken to lose with more rows, and where they give more than
none, with fewer rows too.

To change the way costs time: a head that was not asked must first read what it missed. So it is looked at
when requests come, then every few steps; and a batch that drains goes on as it was.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state import draft_trials, prompt_cost
from mmengine.core.state.draft_arbiter import ALL, NO_BUCKET, NO_DRAFTERS, SETTLED, DraftArbiter
from mmengine.core.state.draft_trials import DraftTrials
from mmengine.core.state.prompt_cost import PromptCost
from mmengine.core.state.step_cost import ONE, StepCosts, rows_of

FEW = 8  # rows, for which all are asked where nothing is known
AT_FIRST = 3  # steps between looks while it is not known what drafts give
REST = 8  # steps without drafts, so that their time is known; the first still verifies some
RARELY, OFTEN = 128, 64  # steps with drafts between rests, where they give clearly more than none, and else
CLEARLY = ONE + ONE // 4  # what drafts give, beside none, where no other way is looked for
LONGEST = 512  # steps between looks
IN_VAIN = 8  # steps from the first one on, in which all are asked and nobody has any drafts
MORE, STAYS = 16, 16  # one part in so many: a trial must give so much more than none; so much more than the
# way that is taken, another way


class Goodput(DraftArbiter):
    """See DraftArbiter. `waits`: of DraftTrials."""

    def __init__(self, num_rows: int, most: int, *, overlaps: bool = False):
        super().__init__(num_rows, most, overlaps=overlaps)
        self.prompts, self.trials = PromptCost(), DraftTrials(self.waits)
        self.asked, self.turned_off = NO_DRAFTERS, -SETTLED
        self.renewed = NO_BUCKET  # of which it is seen anew what steps without drafts take, before a trial

    def admit(self, row: int) -> None:
        super().admit(row)
        self.prompts.admit()

    def last_drafter_after(self, num_rows: int) -> int:
        rests = self.resting and not self._is_another_batch(num_rows)
        return NO_DRAFTERS if rests else self._asked(num_rows)

    def passes(self, num_rows: int, has_drafts: bool, ns: int, asked: int | None = None) -> bool:
        self.trials.passes(ns)
        self.prompts.tokens += num_rows
        needs_none = super().passes(num_rows, has_drafts, ns, asked)
        return needs_none and self.asked == NO_DRAFTERS

    def _counters(self) -> Iterator[tuple[object, str]]:
        yield from super()._counters()
        yield self, "renewed"
        yield from ((self.prompts, name) for name in prompt_cost.COUNTERS)
        yield from ((self.trials, name) for name in draft_trials.COUNTERS)

    def _asked(self, num_rows: int) -> int:
        """The way of a step of so many rows: where somebody came, what was best for as many."""
        if not self.came or self.steps - self.turned_off < SETTLED:
            return self.asked
        bucket = StepCosts.bucket(num_rows)
        if self.trials.waits_for(bucket):
            return NO_DRAFTERS
        return self.ways[bucket] if bucket in self.ways else self._presumed(bucket)

    def _is_another_batch(self, num_rows: int) -> bool:
        """What the last rows of a batch rest from is not for the next one, whose prompts are read now or not
        at all."""
        return self.came and num_rows > 2 * self.num_rows

    def _presumed(self, bucket: int) -> int:
        """The way of rows of which nothing is known: that of the next larger number, if it drafts."""
        larger = [other for other, way in self.ways.items() if other > bucket and way != NO_DRAFTERS]
        if larger:
            return self.ways[min(larger)]
        few = rows_of(bucket) <= FEW and not self.trials.left(bucket, 1)
        return ALL if few else NO_DRAFTERS

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
        num_rows = len(rows)
        if self._is_another_batch(num_rows):
            self.resting = 0
        if not (pure and num_rows):
            self.prompts.read(reading_ns)
        else:
            bucket = StepCosts.bucket(num_rows)
            if self.came:
                self._enter(bucket, self._asked(num_rows))
            is_off = (self.last_drafter_after(num_rows) if asked is None else asked) == NO_DRAFTERS
            if drafts or not is_off:
                self._drafted(bucket, num_rows, drafts, made, tokens, ns)
        super().ran(rows, drafts, tokens, made, ns, pure, asked, reading_ns)

    def _enter(self, bucket: int, asked: int) -> None:
        """Take the way that is known, or presumed, of a batch to which somebody came."""
        if asked != NO_DRAFTERS and self.asked == NO_DRAFTERS:
            self._turn_on()
            self.trials.begin(proven=(self.costs.rate(bucket, asked) or 0) > ONE)
        self.asked = asked

    def _drafted(self, bucket: int, num_rows: int, drafts: int, made: int, tokens: int, ns: int) -> None:
        """A step that only decoded had a part for drafts."""
        self.prompts.tokens += max(tokens - num_rows, 0)
        plain_ns = self.costs.plain_ns(bucket, num_rows)
        if plain_ns:
            ns = self.costs.no_hiccup(bucket, self.asked, num_rows, drafts, ns)
            beside_ns = self.prompts.ns_a_token() * tokens if drafts else 0
            self.trials.write_down(drafts, made, ns + beside_ns, plain_ns * tokens // num_rows, plain_ns)

    def _decide(self, rows: np.ndarray, is_due: bool) -> None:
        plain_ns = self.costs.plain_ns(self.bucket, len(rows))
        if self.asked != NO_DRAFTERS and self.empty >= IN_VAIN and not self.trials.num_drafted:
            self.trials.end(self.bucket, plain_ns, soonest=0)
            self.asked, self.left = NO_DRAFTERS, SETTLED
        elif self.asked != NO_DRAFTERS and plain_ns and self.trials.failed(plain_ns):
            self._fail(plain_ns)
        elif is_due:
            self._look(rows, plain_ns)

    def _fail(self, plain_ns: int) -> None:
        """Drafts lost too much. With the rows of which it is so: a batch that drained lost it before."""
        if self.bucket == self.full:
            self.acceptance.count()
            self.costs.had_none(self.bucket, self.asked)
            self._choose(plain_ns)
            return
        drained, self.bucket = self.bucket, self.full
        self._turn_off(self.costs.plain_ns(self.full, rows_of(self.full)) or plain_ns)
        self.bucket = drained

    def _look(self, rows: np.ndarray, plain_ns: int) -> None:
        """Decide which way to take."""
        self._note_look()
        if self.asked == NO_DRAFTERS:
            self._try(plain_ns)
            return
        if self.bucket == self.full and self._needs_rest():
            self.costs.forget_plain(self.bucket)  # the machine, and what is asked, may be another since
            self.resting, self.left = REST, REST
            return
        if self._limit(rows):
            return
        self._choose(plain_ns)

    def _choose(self, plain_ns: int) -> None:
        asked = self._best_way()
        if asked == NO_DRAFTERS:
            self._turn_off(plain_ns)
            return
        if self._rate(asked) is None:
            self.left = AT_FIRST
        else:
            self.trials.succeed(self.bucket)
        if asked != self.asked:
            self.trials.go_on()
        self.asked = self.ways[self.bucket] = asked

    def _try(self, plain_ns: int) -> None:
        """All are asked, if it is time, and known what steps take without."""
        self.left = SETTLED
        if self.steps - self.turned_off < SETTLED or self.bucket != self.full:
            return
        left = self.trials.left(self.bucket, plain_ns or 1)
        if left:
            self.left = min(left, LONGEST)
            return
        if self.renewed != self.bucket:
            self.costs.forget_plain(self.bucket)
            self.renewed, self.watches = self.bucket, True
        if not self.costs.knows_plain(self.bucket, itself=True):
            self.left = REST
            return
        self.costs.forget_drafted(self.bucket)
        self._turn_on()
        self.trials.begin()
        self.asked = self.ways[self.bucket] = ALL
        self.left = AT_FIRST

    def _turn_on(self) -> None:
        self.renewed, self.limited, self.empty = NO_BUCKET, False, 0
        self.room[:] = self._most

    def _turn_off(self, plain_ns: int) -> None:
        if self.bucket != self.full:
            self.trials.begin()  # what was lost was so with more rows
        self.trials.end(self.bucket, plain_ns)
        self.asked = self.ways[self.bucket] = NO_DRAFTERS
        self.turned_off, self.left, self.renewed = self.steps, SETTLED, NO_BUCKET

    def _needs_rest(self) -> bool:
        """Whether what a step without drafts takes should be seen (again)."""
        if not self.costs.knows_plain(self.bucket):
            return True
        rate = self._rate(self.asked)
        rests = OFTEN if rate is not None and rate < CLEARLY else RARELY
        return self.costs.since_plain.get(self.bucket, 0) >= rests

    def _rate(self, asked: int) -> int | None:
        return self.costs.rate(self.bucket, asked, self.prompts.ns_a_token())

    def _best_way(self) -> int:
        """A way that gives more than none, by a sixteenth where that is not known yet; or one to be tried."""
        least, best, found = ONE if self.trials.proven else ONE + ONE // MORE, 0, NO_DRAFTERS
        for asked in (ALL, *self.acceptance.before_last()):
            rate = self._rate(asked)
            if rate is None:
                return asked if found == NO_DRAFTERS or best < CLEARLY else found
            value = rate + (rate // STAYS if asked == self.asked else 0)
            if rate > least and value > best:
                best, found = value, asked
        return found
