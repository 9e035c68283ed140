"""Decides how much a trial of drafts may lose, and when the next trial begins.

A ledger in ns, from a log's step times. While drafts are on, each step with drafts is compared with the time
for as many tokens without drafts, with the time's share for reading prompts. After drafts are turned off, a
trial begins when the loss is a small share of the time since.
"""

from mmengine.core.state.step_cost import ENOUGH_DRAFTED, rows_of

SOONEST, LATEST = 512, 8192  # in steps without drafts: the shortest and longest time before the next trial
SHARE = 128  # a trial may have lost one part in SHARE of the time until the next trial
TOO_MUCH = 6  # in steps without drafts: a trial with this loss ends; with twice this loss it ends at once
KEPT_GAIN = 8  # in steps without drafts: the loss that drafts may cause after an equal gain
MOST_NS = 1 << 60
COUNTERS = ("clock_ns", "lost_ns", "sunk_ns", "num_drafted", "is_proven")


class DraftTrials:
    """The ledger of trials. `waits`, by bucket: the last trial's loss in ns, and the time by `clock_ns`
    before which no other begins.
    """

    def __init__(self, waits: dict[int, tuple[int, int]]) -> None:
        self.waits = waits
        self.clock_ns = 0  # of all steps
        self.lost_ns = 0  # relative to steps without drafts, since drafts are on; negative: a gain
        self.sunk_ns = 0  # the loss of other levels in the same trial, and of its beginning
        self.num_drafted = 0  # steps at this level that verified drafts
        self.is_proven = False  # the steps gained clearly over no drafts

    def count_step(self, ns: int) -> None:
        self.clock_ns = min(self.clock_ns + max(ns, 0), MOST_NS)

    def begin(self, *, is_proven: bool = False) -> None:
        """Begin a trial: drafts are turned on."""
        self.lost_ns, self.sunk_ns, self.num_drafted, self.is_proven = 0, 0, 0, is_proven

    def continue_trial(self) -> None:
        """Continue the trial with another level after one that lost."""
        self.sunk_ns, self.lost_ns, self.num_drafted = self.sunk_ns + max(self.lost_ns, 0), 0, 0
        self.is_proven = False

    def succeed(self, bucket: int) -> None:
        self.is_proven = True
        self.waits.pop(bucket, None)

    def record(self, drafts: int, made: int, ns: int, without_ns: int, plain_ns: int) -> None:
        """Record a step of `ns` that verified `drafts` and made others. Without drafts its tokens would have
        taken `without_ns`, and one step takes `plain_ns`.
        """
        lost_ns = min(ns - without_ns, MOST_NS)
        self.num_drafted += drafts > 0
        if made and not self.num_drafted:  # a drafter had to read the tokens that it missed
            self.sunk_ns = min(self.sunk_ns + max(lost_ns, 0), MOST_NS)
        else:
            self.lost_ns = max(min(self.lost_ns + lost_ns, MOST_NS), -KEPT_GAIN * plain_ns)

    def failed(self, plain_ns: int) -> bool:
        """Return whether drafts lost too much. A step without drafts takes `plain_ns`."""
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
        """Return the steps (`plain_ns` each) until the next trial. Trials with fewer rows, or of up to 1.5
        times as many, count too."""
        rows = rows_of(bucket)
        untils = [until for other, (_, until) in self.waits.items() if 2 * rows_of(other) <= 3 * rows]
        return -(-max(max(untils, default=0) - self.clock_ns, 0) // max(plain_ns, 1))
