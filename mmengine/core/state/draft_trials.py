"""Decides how much a trial of drafts may lose, and when the next trial begins.

The class is an account of times in ns, computed from the step times in the log. While drafts are on, the time
for each step with drafts (including a share of the time for reading prompts) is compared with the time that
as many tokens take without drafts. After drafts were turned off, the next trial begins when the last trial's
loss is small in relation to the time since then.
"""

from mmengine.core.state.step_cost import ENOUGH_DRAFTED, rows_of

SOONEST, LATEST = 512, 8192  # in steps without drafts: the shortest and longest time before the next trial
SHARE = 128  # the time until the next trial is at least SHARE times the loss of the last trial
# In steps without drafts: a trial ends with this loss, or with twice this loss before ENOUGH_DRAFTED steps.
TOO_MUCH = 6
KEPT_GAIN = 8  # in steps without drafts: the largest gain that later losses are offset against
MOST_NS = 1 << 60
COUNTERS = ("clock_ns", "lost_ns", "sunk_ns", "num_drafted", "is_proven")


class DraftTrials:
    """The account of trials. `waits`: bucket -> the last trial's loss in ns, and the time on `clock_ns`
    before which no other trial begins.
    """

    def __init__(self, waits: dict[int, tuple[int, int]]) -> None:
        self.waits = waits
        self.clock_ns = 0  # the time of all steps
        self.lost_ns = (
            0  # loss relative to steps without drafts, at the trial's current level; negative: a gain
        )
        self.sunk_ns = (
            0  # loss at earlier levels of the same trial, and before the first drafts were verified
        )
        self.num_drafted = 0  # steps at this level that verified drafts
        self.is_proven = False  # whether drafts were found to save time

    def count_step(self, ns: int) -> None:
        self.clock_ns = min(self.clock_ns + max(ns, 0), MOST_NS)

    def begin(self, *, is_proven: bool = False) -> None:
        """Begin a trial: drafts are turned on."""
        self.lost_ns, self.sunk_ns, self.num_drafted, self.is_proven = 0, 0, 0, is_proven

    def continue_trial(self) -> None:
        """Continue the trial with another draft level. The loss so far is added to `sunk_ns`."""
        self.sunk_ns, self.lost_ns, self.num_drafted = self.sunk_ns + max(self.lost_ns, 0), 0, 0
        self.is_proven = False

    def succeed(self, bucket: int) -> None:
        self.is_proven = True
        self.waits.pop(bucket, None)

    def record(self, drafts: int, made: int, ns: int, without_ns: int, plain_ns: int) -> None:
        """Record a step that took `ns`, verified `drafts` drafts and made `made` drafts. Without drafts, the
        step's tokens would have taken `without_ns`. `plain_ns`: the time of a step without drafts.
        """
        lost_ns = min(ns - without_ns, MOST_NS)
        self.num_drafted += drafts > 0
        if made and not self.num_drafted:  # a drafter had to read the tokens that it missed
            self.sunk_ns = min(self.sunk_ns + max(lost_ns, 0), MOST_NS)
        else:
            self.lost_ns = max(min(self.lost_ns + lost_ns, MOST_NS), -KEPT_GAIN * plain_ns)

    def failed(self, plain_ns: int) -> bool:
        """Return whether the trial lost too much time. `plain_ns`: the time of a step without drafts."""
        times = 1 if self.num_drafted >= ENOUGH_DRAFTED else 2
        return self.num_drafted > 0 and self.lost_ns > times * TOO_MUCH * plain_ns

    def end(self, bucket: int, plain_ns: int, soonest: int = SOONEST) -> None:
        """End the trial: drafts are turned off, for at least `soonest` steps."""
        lost_ns = self.sunk_ns + max(self.lost_ns, 0)
        wait = min(max(soonest * plain_ns, SHARE * lost_ns), LATEST * plain_ns)
        self.waits[bucket] = (lost_ns, min(self.clock_ns + wait, MOST_NS))

    def waits_for(self, bucket: int) -> bool:
        """Return whether this bucket's next trial must wait."""
        return bucket in self.waits and self.clock_ns < self.waits[bucket][1]

    def steps_left(self, bucket: int, plain_ns: int) -> int:
        """Return how many steps of `plain_ns` are left until the next trial in this bucket. The waiting
        times for buckets with up to 1.5 times as many rows count too."""
        rows = rows_of(bucket)
        untils = [until for other, (_, until) in self.waits.items() if 2 * rows_of(other) <= 3 * rows]
        return -(-max(max(untils, default=0) - self.clock_ns, 0) // max(plain_ns, 1))
