"""What drafts lose while it is found out whether they pay, and when that is tried again.

A ledger in ns, by the times of steps that a log holds. While drafts are on, each step that drafts had a part
in is set against what as many tokens take without, with their share of what reading prompts for drafts takes.
Turned off, they are tried again when that loss has become a small share of the time since.
"""

from mmengine.core.state.step_cost import ENOUGH_DRAFTED, rows_of

SOONEST, LATEST = 512, 8192  # steps without drafts, in their time, before all are level again
SHARE = 128  # of the time until then a trial may have lost one part in so many
TOO_MUCH = 6  # steps without drafts, in their time: a trial that lost as much is over; twice that, at once
KEPT_GAIN = 8  # steps without drafts, in their time, that drafts may lose after they gained as much
MOST_NS = 1 << 60
COUNTERS = ("clock_ns", "lost_ns", "sunk_ns", "num_drafted", "is_proven")


class DraftTrials:
    """`waits`, by bucket: what the last trial lost, in ns, and until when by `clock_ns` there is no other."""

    def __init__(self, waits: dict[int, tuple[int, int]]) -> None:
        self.waits = waits
        self.clock_ns = 0  # of all steps
        self.lost_ns = 0  # beside steps without drafts, since drafts were turned on; below 0: gained
        self.sunk_ns = 0  # what other ways lost before, in the same trial, and what it took to begin
        self.num_drafted = 0  # steps with this way that verified some
        self.is_proven = False  # they gave clearly more than none

    def count_step(self, ns: int) -> None:
        self.clock_ns = min(self.clock_ns + max(ns, 0), MOST_NS)

    def begin(self, *, is_proven: bool = False) -> None:
        """Drafts are turned on."""
        self.lost_ns, self.sunk_ns, self.num_drafted, self.is_proven = 0, 0, 0, is_proven

    def continue_trial(self) -> None:
        """Another way is tried behind one that lost."""
        self.sunk_ns, self.lost_ns, self.num_drafted = self.sunk_ns + max(self.lost_ns, 0), 0, 0
        self.is_proven = False

    def succeed(self, bucket: int) -> None:
        self.is_proven = True
        self.waits.pop(bucket, None)

    def record(self, drafts: int, made: int, ns: int, without_ns: int, plain_ns: int) -> None:
        """A step with a part for drafts took `ns`, which verified `drafts` and made others; its tokens would
        have taken `without_ns` without, and a step without takes `plain_ns`."""
        lost_ns = min(ns - without_ns, MOST_NS)
        self.num_drafted += drafts > 0
        if made and not self.num_drafted:  # who drafts had to read what it missed
            self.sunk_ns = min(self.sunk_ns + max(lost_ns, 0), MOST_NS)
        else:
            self.lost_ns = max(min(self.lost_ns + lost_ns, MOST_NS), -KEPT_GAIN * plain_ns)

    def failed(self, plain_ns: int) -> bool:
        """Whether drafts lost too much, where a step without them takes `plain_ns`."""
        times = 1 if self.num_drafted >= ENOUGH_DRAFTED else 2
        return self.num_drafted > 0 and self.lost_ns > times * TOO_MUCH * plain_ns

    def end(self, bucket: int, plain_ns: int, soonest: int = SOONEST) -> None:
        """Drafts are turned off, for what they lost, and tried again in `soonest` steps or later."""
        lost_ns = self.sunk_ns + max(self.lost_ns, 0)
        wait = min(max(soonest * plain_ns, SHARE * lost_ns), LATEST * plain_ns)
        self.waits[bucket] = (lost_ns, min(self.clock_ns + wait, MOST_NS))

    def waits_for(self, bucket: int) -> bool:
        """Whether it is too early for drafts with so many rows."""
        return bucket in self.waits and self.clock_ns < self.waits[bucket][1]

    def steps_left(self, bucket: int, plain_ns: int) -> int:
        """Steps of `plain_ns` until drafts are tried; what was found of fewer rows, or of half as many again,
        counts for more."""
        rows = rows_of(bucket)
        untils = [until for other, (_, until) in self.waits.items() if 2 * rows_of(other) <= 3 * rows]
        return -(-max(max(untils, default=0) - self.clock_ns, 0) // max(plain_ns, 1))
