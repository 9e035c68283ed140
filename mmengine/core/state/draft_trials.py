"""Decides when a draft trial has lost too much time, and when the next trial may begin.

A trial turns drafts on to find out whether they save time. All times come from the step times in the log, in
ns. A step with drafts is compared with the time that its tokens would take without drafts. A share of the
draft head's time for prompts is added to the step's time. The next trial begins when the last trial's loss is
small compared with the time since drafts were turned off.
"""

from mmengine.core.state.step_cost import ENOUGH_DRAFTED, rows_of

SOONEST, LATEST = 512, 8192  # minimum and maximum time before the next trial, in steps without drafts
SHARE = 128  # the next trial waits at least SHARE times the last trial's loss
# Maximum loss in a trial, in steps without drafts. Until ENOUGH_DRAFTED steps have verified drafts, twice
# this loss is allowed.
TOO_MUCH = 6
KEPT_GAIN = 8  # maximum gain, in steps without drafts, that can offset later losses
MOST_NS = 1 << 60
COUNTERS = ("clock_ns", "lost_ns", "sunk_ns", "num_drafted", "is_proven")


class DraftTrials:
    """Accounts for the time that trials lose. `waits`: batch-size bucket -> (last trial's loss in ns,
    earliest `clock_ns` for the next trial).
    """

    def __init__(self, waits: dict[int, tuple[int, int]]) -> None:
        self.waits = waits
        self.clock_ns = 0  # the sum of the times of all steps
        # Time lost against steps without drafts, at the trial's current level. Negative: time gained.
        self.lost_ns = 0
        # Time lost at earlier levels of the trial, and before the first drafts were verified.
        self.sunk_ns = 0
        self.num_drafted = 0  # number of steps at this level that verified drafts
        self.is_proven = False  # whether drafts were found to save time

    def count_step(self, ns: int) -> None:
        self.clock_ns = min(self.clock_ns + max(ns, 0), MOST_NS)

    def begin(self, *, is_proven: bool = False) -> None:
        """Begin a trial, because drafts were turned on."""
        self.lost_ns, self.sunk_ns, self.num_drafted, self.is_proven = 0, 0, 0, is_proven

    def continue_trial(self) -> None:
        """Continue the trial with another draft level. The previous loss is added to `sunk_ns`."""
        self.sunk_ns, self.lost_ns, self.num_drafted = self.sunk_ns + max(self.lost_ns, 0), 0, 0
        self.is_proven = False

    def succeed(self, bucket: int) -> None:
        self.is_proven = True
        self.waits.pop(bucket, None)

    def record(self, drafts: int, made: int, ns: int, without_ns: int, plain_ns: int) -> None:
        """Record a step that took `ns`, verified `drafts` drafts and proposed `made` drafts.

        `without_ns`: the time that the step's tokens would have taken without drafts. `plain_ns`: the time of
        one step without drafts.
        """
        lost_ns = min(ns - without_ns, MOST_NS)
        self.num_drafted += drafts > 0
        # Before the first drafts are verified, the drafter reads the tokens that it missed. This cost occurs
        # once per level.
        if made and not self.num_drafted:
            self.sunk_ns = min(self.sunk_ns + max(lost_ns, 0), MOST_NS)
        else:
            self.lost_ns = max(min(self.lost_ns + lost_ns, MOST_NS), -KEPT_GAIN * plain_ns)

    def failed(self, plain_ns: int) -> bool:
        """Return whether the trial lost too much time. `plain_ns`: a step's time without drafts."""
        times = 1 if self.num_drafted >= ENOUGH_DRAFTED else 2
        return self.num_drafted > 0 and self.lost_ns > times * TOO_MUCH * plain_ns

    def end(self, bucket: int, plain_ns: int, soonest: int = SOONEST) -> None:
        """End the trial, because drafts were turned off. The next trial begins at least `soonest` steps
        later.
        """
        lost_ns = self.sunk_ns + max(self.lost_ns, 0)
        wait = min(max(soonest * plain_ns, SHARE * lost_ns), LATEST * plain_ns)
        self.waits[bucket] = (lost_ns, min(self.clock_ns + wait, MOST_NS))

    def waits_for(self, bucket: int) -> bool:
        """Return whether the next trial in this bucket must wait."""
        return bucket in self.waits and self.clock_ns < self.waits[bucket][1]

    def steps_left(self, bucket: int, plain_ns: int) -> int:
        """Return the number of steps, each `plain_ns` long, until this bucket's next trial. A longer wait of
        another bucket also applies, if that bucket has at most 1.5 times this bucket's rows.
        """
        rows = rows_of(bucket)
        untils = [until for other, (_, until) in self.waits.items() if 2 * rows_of(other) <= 3 * rows]
        return -(-max(max(untils, default=0) - self.clock_ns, 0) // max(plain_ns, 1))
