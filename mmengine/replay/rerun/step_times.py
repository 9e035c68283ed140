"""Step times for a simulation. A simulated step's time is its fitted time, multiplied by a ratio that is
drawn from the log: a logged step's time divided by that step's fitted time.
"""

from dataclasses import dataclass

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.replay.rerun.fit import KINDS, FittedCost, StepWork, fit, work_of_plan

# Number of consecutive steps in the log whose deviations are drawn together, because slow steps follow slow
# steps.
RUN = 16


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in the log. `device_ns`: the step's time on the device. `host_ns`: the time that the engine
    spent around the step while the device was idle, or -1 if unknown. `end_ns`: the time at which the result
    returned.
    """

    work: StepWork
    device_ns: int
    host_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The fitted costs and the deviations of the log's steps.

    `ratios`: for each kind of step, the logged time of each step as a multiple of its fitted time.
    `overlaps`: whether the log's engine worked while the device computed. With overlap, the ratios compare
    device times; without overlap, they compare the sums of device and host times.
    """

    cost: FittedCost
    ratios: tuple[np.ndarray, ...]
    overlaps: bool

    def drawn(self, rng: np.random.Generator, *, overlaps: bool) -> "DrawnTimes":
        """Return step times for a simulation. `overlaps`: whether the simulated engine works while the device
        computes.
        """
        return DrawnTimes(self, rng, overlaps)


def fit_times(steps: list[TimedStep], *, overlaps: bool) -> StepTimes:
    """Fit the costs to a log's steps. `overlaps`: see StepTimes."""
    work = np.array([each.work.amounts for each in steps])
    device_ns = np.array([each.device_ns for each in steps], np.float64)
    rows = np.array([each.work.num_rows for each in steps], np.float64)
    host_ns = np.array([each.host_ns for each in steps], np.float64)
    known = host_ns >= 0
    host = np.zeros(2)
    if known.any() and np.median(host_ns[known]) > 0:
        amounts = np.stack((np.ones(int(known.sum())), rows[known]), axis=1)
        host = fit(amounts, np.maximum(host_ns[known], 1.0))
    cost = FittedCost(fit(work, device_ns), host)
    logged, fitted = device_ns, work @ cost.prices
    if not overlaps:
        modelled_ns = host[0] + host[1] * rows
        fitted = fitted + modelled_ns
        logged = logged + np.where(known, host_ns, modelled_ns)
    ratios = logged / np.maximum(fitted, 1.0)
    kinds = np.array([each.work.kind for each in steps])
    return StepTimes(cost, tuple(ratios[kinds == kind] for kind in range(len(KINDS))), overlaps)


class DrawnTimes:
    """Draws the step times of a simulation. A step time is the fitted time, multiplied by the ratio of a step
    of the same kind in the log. The ratios of RUN consecutive steps are drawn together.
    """

    def __init__(self, times: StepTimes, rng: np.random.Generator, overlaps: bool):
        self._times, self._rng, self._overlaps = times, rng, overlaps
        every = np.concatenate(times.ratios)
        self._ratios = [ratios if len(ratios) else every for ratios in times.ratios]
        # For each kind: the next index, and the number of steps left in the run.
        self._next = [(0, 0)] * len(self._ratios)

    def price(self, plan: StepPlan, num_embeds: int) -> int:
        """Return a step's time in ns. If steps do not overlap, the time includes the engine's own time."""
        return self.step_ns(work_of_plan(plan, num_embeds))

    def step_ns(self, work: StepWork) -> int:
        """Return the time of a step with this work in ns. See `price`."""
        cost = self._times.cost
        fitted = cost.device_ns(work) + (0.0 if self._overlaps else cost.host_ns(work.num_rows))
        return round(fitted * self._ratio(work.kind))

    def host_ns(self, num_rows: int) -> int:
        """Return the engine's own time before a step in ns, as far as `price` does not include it."""
        return round(self._times.cost.host_ns(num_rows)) if self._overlaps else 0

    def _ratio(self, kind: int) -> float:
        ratios = self._ratios[kind]
        place, left = self._next[kind]
        if not left:
            place, left = int(self._rng.integers(len(ratios))), RUN
        self._next[kind] = (place + 1) % len(ratios), left - 1
        return float(ratios[place])
