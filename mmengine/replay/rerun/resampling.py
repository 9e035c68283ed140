"""Draws the step times of a simulation from the steps of a log.

A simulated step gets its ratio and its pause from a logged step of the same class. Simulated steps that
follow each other get theirs from logged steps that follow each other, because slow steps follow slow steps.
After RUN steps, and when the engine was idle, another place in the log is drawn. The place is at about the
simulation's time, because a machine's speed drifts. It is also after about the same busy time, because a
machine more often stops a process that has been busy for long.
"""

import numpy as np

from mmengine.replay.rerun.fit import StepWork
from mmengine.replay.rerun.step_times import BEFORE, BEGUN_NS, DURING, PLAIN, StepTimes, class_of

RUN = 256
WINDOW = 16  # Places are drawn from the log's steps within this fraction of all steps before and after.
MIN_WINDOW = 64
MIN_PLACES = 8
BUSY_RANGE = 0.7, 1.4  # Busy times that count as about the same, as multiples.


class DrawnTimes:
    """Draws step times. `rng`: the source of randomness. `overlaps`: whether the simulated engine works while
    the device computes.
    """

    def __init__(self, times: StepTimes, rng: np.random.Generator, *, overlaps: bool):
        self._times, self._rng, self._overlaps = times, rng, overlaps
        plain, every = times.is_plain, np.ones(len(times.ratios), bool)
        self._ratios_of, self._pauses_of = _Members(times.classes, plain), _Members(times.classes, every)
        self._place = self._left = 0  # The next step of the log, and the number of steps left in the run.
        self._busy_ns = 0.0

    def begin(self) -> None:
        """Draw from another place in the log, because the engine was idle."""
        self._busy_ns, self._left = 0.0, 0

    def step_ns(self, work: StepWork, now_ns: int) -> int:
        """Return the time in ns of a step that begins at `now_ns`. If steps do not overlap, the time includes
        the engine's own time.
        """
        times = self._times
        fitted = times.cost.device_ns(work) + (0.0 if self._overlaps else times.cost.host_ns(work.num_rows))
        if not self._left:
            self._place, self._left = self._draw_place(now_ns), RUN
            self._ratios_of.begin(self._place)
            self._pauses_of.begin(self._place)
        name = int(class_of(work.kind, fitted))
        ratio = times.ratios[self._ratios_of.like(name, self._place, self._rng)]
        pause_ns = times.pauses_ns[self._pauses_of.like(name, self._place, self._rng)]
        self._place, self._left = (self._place + 1) % len(times.ratios), self._left - 1
        return self._passed(fitted * ratio + pause_ns)

    def phase(self, step_ns: int, until_ns: int) -> int:
        """Return the phase of a step if the next request arrives `until_ns` after the step begins."""
        if until_ns < step_ns:
            return DURING
        return BEFORE if until_ns < step_ns + self._times.lead_ns else PLAIN

    def delay_ns(self, phase: int) -> int:
        """Return the delay in ns of a step in this phase."""
        if phase == PLAIN:
            return 0
        delays = self._times.delays_ns[phase]
        return self._passed(delays[int(self._rng.integers(len(delays)))])

    def host_ns(self, num_rows: int) -> int:
        """Return the engine's own time before a step in ns, as far as `step_ns` does not include it."""
        return round(self._times.cost.host_ns(num_rows)) if self._overlaps else 0

    def _passed(self, time_ns: float) -> int:
        self._busy_ns = min(self._busy_ns + time_ns, BEGUN_NS)
        return round(time_ns)

    def _draw_place(self, now_ns: int) -> int:
        busy_ns, count = self._times.busy_ns, len(self._times.ratios)
        reach = min(count, max(MIN_WINDOW, count // WINDOW))
        at = int(np.searchsorted(self._times.ends_ns, now_ns))
        low = min(max(0, at - reach), count - reach)
        high = max(min(count, at + reach), reach)
        busy_ns = busy_ns[low:high]
        least, most = (share * self._busy_ns for share in BUSY_RANGE)
        near = np.flatnonzero((busy_ns >= least) & (busy_ns <= most))
        if len(near) < MIN_PLACES:
            near = np.argsort(np.abs(busy_ns - self._busy_ns), kind="stable")[:MIN_PLACES]
        return low + int(near[int(self._rng.integers(len(near)))])


class _Members:
    """The log's steps by class, as far as `is_member` is true. `begin` starts a run at a step of the log."""

    def __init__(self, classes: np.ndarray, is_member: np.ndarray):
        names = np.unique(classes[is_member]).tolist()
        self._steps = {name: np.flatnonzero(is_member & (classes == name)) for name in names}
        self._names = np.array(names)
        self._nearest: dict[int, int] = {}
        self._begin = 0
        self._next: dict[int, int] = {}  # For each class, the first step that was not used in this run.

    def begin(self, place: int) -> None:
        self._begin = place
        self._next.clear()

    def like(self, name: int, place: int, rng: np.random.Generator) -> int:
        """Return the next step at or after `place` of the class `name`, or of the most similar class."""
        nearest = self._nearest.get(name)
        if nearest is None:
            nearest = self._nearest[name] = int(self._names[np.abs(self._names - name).argmin()])
        steps = self._steps[nearest]
        index = int(np.searchsorted(steps, max(place, self._next.get(nearest, 0))))
        if index == len(steps):  # The log ends: one of the steps since the run began.
            first = min(int(np.searchsorted(steps, self._begin)), len(steps) - 1)
            index = int(rng.integers(max(0, first - MIN_PLACES // 2), len(steps)))
        found = int(steps[index])
        self._next[nearest] = found + 1
        return found
