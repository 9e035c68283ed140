"""Draws the step times of a simulation from the steps of a log. A step takes fitted time * slowness * ratio +
pause (`step_times.py` defines these terms).

Slowness: a machine can be slow for several seconds. A simulated step therefore has the slowness of the logged
steps near the same time.

Ratio and pause: a simulated step takes both from a logged step of the same class, which has the same kind and
a similar size. Consecutive simulated steps of a class use consecutive logged steps, which are called a run.
The runs of all classes end after RUN simulated steps, or when the engine becomes idle. Each class then begins
its next run at a random logged step that meets two conditions. First, the step is near the simulation's time.
Second, the logged engine had been busy before the step for about as long as the simulated engine has been.
The second condition matters, because a long-busy process has more pauses.
"""

import numpy as np

from mmengine.replay.rerun.fit import StepWork
from mmengine.replay.rerun.step_times import BEFORE, BEGUN_NS, DURING, PLAIN, StepTimes, class_of

RUN = 256  # Number of simulated steps after which the runs of all classes end.
# With n logged steps, a run begins at most max(n / WINDOW, MIN_WINDOW) steps before or after the logged step
# at the simulation's time.
WINDOW = 16
MIN_WINDOW = 64
MIN_PLACES = 8
LEAST = 0.5  # Minimum time of a delayed step, as a multiple of its usual time.
BUSY_RANGE = 0.7, 1.4  # Accepted busy times, as multiples of the simulated busy time.


class DrawnTimes:
    """Draws step times. `rng`: the source of randomness. `overlaps`: whether the simulated engine works while
    the device computes.
    """

    def __init__(self, times: StepTimes, rng: np.random.Generator, *, overlaps: bool):
        self._times, self._rng, self._overlaps = times, rng, overlaps
        self._ratios_of = _Members(times, times.is_plain, rng)
        self._pauses_of = _Members(times, np.ones(len(times.ratios), bool), rng)
        self._slowness = _Slowness(times)
        # For each phase and kind, the cumulative chances of the delays (see `delay_ns`).
        self._chances = {
            key: _chances(lengths, times.arrivals_per_ns) for key, lengths in times.delayed_ns.items()
        }
        # The last step's kind, its slowness, its usual time, and its time without a pause, in ns.
        self._last = 0, 1.0, 0.0, 0.0
        self._left = 0  # Number of steps before the current runs end.
        self._busy_ns = 0.0

    def begin(self) -> None:
        """Start new runs, because the engine was idle."""
        self._busy_ns, self._left = 0.0, 0

    def step_ns(self, work: StepWork, now_ns: int) -> int:
        """Return the time in ns of a step that begins at `now_ns`. If steps do not overlap, the time includes
        the engine's own time.
        """
        times = self._times
        fitted = times.cost.device_ns(work) + (0.0 if self._overlaps else times.cost.host_ns(work.num_rows))
        if not self._left:
            self._left = RUN
            for members in (self._ratios_of, self._pauses_of):
                members.begin(now_ns, self._busy_ns)
        self._left -= 1
        name = int(class_of(work.kind, work.num_rows, fitted))
        slowness = self._slowness.at(now_ns)
        slow_ns = fitted * slowness
        own_ns = slow_ns * times.ratios[self._ratios_of.like(name)]
        usual = times.usual[self._ratios_of.nearest(name)]
        self._last = work.kind, slowness, slow_ns * usual, own_ns
        step_ns = own_ns + times.pauses_ns[self._pauses_of.like(name)]
        self.prolong(step_ns)
        return round(step_ns)

    def phase(self, step_ns: int, until_ns: int) -> int:
        """Return a step's phase (PLAIN, DURING or BEFORE) if the next request arrives `until_ns` after the
        step begins.
        """
        if until_ns < step_ns:
            return DURING
        return BEFORE if until_ns < step_ns + self._times.lead_ns else PLAIN

    def delay_ns(self, phase: int, *, is_certain: bool = True) -> int:
        """Return a random delay in ns for the last step, if the step is in this phase. The delay may be
        negative.

        `is_certain`: False if the caller applies the delay only if a request arrives before the delayed step
        ends. This condition favours long delays. The logged delays already met the same condition, so long
        delays would be favoured twice. To prevent this, a delay is drawn with a chance inverse to the
        probability that a request arrives before the delayed step ends.
        """
        kind, slowness, usual_ns, own_ns = self._last
        delays = self._times.delays_ns.get((phase, kind))
        if delays is None:
            return 0
        if is_certain:
            index = int(self._rng.integers(len(delays)))
        else:
            index = int(np.searchsorted(self._chances[phase, kind], self._rng.random()))
        delay_ns = slowness * delays[min(index, len(delays) - 1)]
        return round(max(usual_ns + delay_ns, LEAST * usual_ns) - own_ns)

    def prolong(self, time_ns: float) -> None:
        """Add a step's time, or the last step's delay, to the engine's busy time."""
        self._busy_ns = min(self._busy_ns + time_ns, BEGUN_NS)

    def host_ns(self, num_rows: int) -> int:
        """Return the engine's own time before a step in ns, or 0 if `step_ns` includes this time."""
        return round(self._times.cost.host_ns(num_rows)) if self._overlaps else 0


def _chances(lengths_ns: np.ndarray, arrivals_per_ns: float) -> np.ndarray:
    """Return the cumulative chances for steps with these lengths. A step's chance is inverse to the
    probability that a request arrives within the step.
    """
    sums = np.cumsum(1.0 / -np.expm1(-arrivals_per_ns * np.maximum(lengths_ns, 1.0)))
    return np.asarray(sums / sums[-1])


def _reach(times: StepTimes) -> int:
    """Return how many steps before or after the simulation's time a run may begin."""
    return max(MIN_WINDOW, len(times.ratios) // WINDOW)


class _Members:
    """The log's steps for which `is_member` is true, by class. `begin` starts a run."""

    def __init__(self, times: StepTimes, is_member: np.ndarray, rng: np.random.Generator):
        self._times, self._rng = times, rng
        names = np.unique(times.classes[is_member]).tolist()
        self._steps = {name: np.flatnonzero(is_member & (times.classes == name)) for name in names}
        self._names = np.array(names)
        self._nearest: dict[int, int] = {}
        self._next: dict[int, int] = {}  # For each class, the index of the next step in this run.
        self._low = self._high = 0  # Range for the run's first step.
        self._busy_ns = 0.0

    def begin(self, now_ns: int, busy_ns: float) -> None:
        """Start a run at a step near the time `now_ns`, before which the engine was busy for `busy_ns`."""
        reach = _reach(self._times)
        at = min(int(np.searchsorted(self._times.ends_ns, now_ns)), len(self._times.ratios) - 1)
        self._low, self._high, self._busy_ns = at - reach, at + reach, busy_ns
        self._next.clear()

    def like(self, name: int) -> int:
        """Return the run's next step of the class `name`, or of the most similar class."""
        nearest = self.nearest(name)
        steps = self._steps[nearest]
        index = self._next.get(nearest, len(steps))
        if index == len(steps):
            index = self._draw(steps)
        self._next[nearest] = index + 1
        return int(steps[index])

    def nearest(self, name: int) -> int:
        """Return the class `name`, or the most similar class that has steps."""
        nearest = self._nearest.get(name)
        if nearest is None:
            nearest = self._nearest[name] = int(self._names[np.abs(self._names - name).argmin()])
        return nearest

    def _draw(self, steps: np.ndarray) -> int:
        low, high = np.searchsorted(steps, (self._low, self._high)).tolist()
        if high - low < MIN_PLACES:
            low, high = max(0, low - MIN_PLACES // 2), min(len(steps), high + MIN_PLACES // 2)
        busy_ns = self._times.busy_ns[steps[low:high]]
        least, most = (share * self._busy_ns for share in BUSY_RANGE)
        near = np.flatnonzero((busy_ns >= least) & (busy_ns <= most))
        if len(near) < MIN_PLACES:
            near = np.arange(high - low)
        return int(low + near[int(self._rng.integers(len(near)))])


class _Slowness:
    """The machine's slowness at the simulation's time.

    The log has no steps while the engine is idle, and in the half that calibration skips. At such a time,
    the slowness is mirrored at the nearest step. For example, the slowness d ns after this step is taken from
    the time d ns before the step.
    """

    def __init__(self, times: StepTimes):
        self._slowness, self._ends_ns = times.slowness, times.ends_ns

    def at(self, now_ns: int) -> float:
        """Return the slowness of a step that begins at `now_ns`."""
        ends_ns = self._ends_ns
        following = int(np.searchsorted(ends_ns, now_ns))
        near = min(following, len(ends_ns) - 1)
        if near and (following == len(ends_ns) or now_ns - ends_ns[near - 1] < ends_ns[near] - now_ns):
            near -= 1
        reflected = int(np.searchsorted(ends_ns, 2 * int(ends_ns[near]) - now_ns))
        return float(self._slowness[min(reflected, len(ends_ns) - 1)])
