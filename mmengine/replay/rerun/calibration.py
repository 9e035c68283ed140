"""Measures how well a simulation predicts a log. Each half of the log is predicted from the other half.

The requests are divided by arrival into equal slices. The odd slices (first, third, ...) form a half, the
even slices the other half, so a drift in the machine's speed affects both. Step times are fitted to one half.
With these times the whole log is simulated, and the other half's simulated latencies are compared with the
log. A prediction is trusted if the error in every latency is within a bound.
"""

from dataclasses import dataclass

import numpy as np

from mmengine.replay.rerun.measurement import Measured
from mmengine.replay.rerun.script import Script
from mmengine.replay.rerun.simulation import LATENCIES, simulate
from mmengine.replay.rerun.step_times import TimedStep, fit_times, own_times
from mmengine.simulation.meter import Meter

MIN_REQUESTS = 10  # Minimum number of requests in each half.
MIN_STEPS = 25  # Minimum number of timed steps in each half.
MAX_SLICES = 40
MAX_PARTS = 1000  # Maximum number of slices in the time after the last arrival.
SEEDS = (0, 1, 2)  # A predicted latency is the median of simulations with these seeds.
ALLOWED = {"p50": 0.10, "p99": 0.20}  # Relative errors that are always accepted.
# If the logged halves differ, errors up to this multiple of their relative difference are accepted too.
OF_DIFFERENCE = 1.5
# Above this ratio between the halves' step times, the refusal names the ratio.
STEADY = 1.1


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A latency in one half, predicted with step times from the other half. `half`: "odd" or "even".
    `logged` and `simulated` are in ms. `other`: the logged latency of the other half.
    """

    half: str
    name: str
    logged: float
    simulated: float
    other: float

    @property
    def error(self) -> float:
        """The simulation's relative error, as a fraction."""
        return self.simulated / self.logged - 1.0 if self.logged else 0.0

    @property
    def difference(self) -> float:
        """The relative difference between the logged halves."""
        return abs(self.other / self.logged - 1.0) if self.logged else 0.0

    @property
    def bound(self) -> float:
        """The largest error that is accepted."""
        return max(ALLOWED[self.name[-3:]], OF_DIFFERENCE * self.difference)

    @property
    def is_good(self) -> bool:
        return abs(self.error) <= self.bound


@dataclass(frozen=True, slots=True)
class Calibration:
    """The comparisons of simulated and logged latencies. `why_not`: why no latency could be compared, or "".
    `slowdown`: the ratio between the halves' step times for equal work (even / odd).
    """

    rows: tuple[HeldOut, ...] = ()
    why_not: str = ""
    slowdown: float = 1.0

    @property
    def refusal(self) -> str:
        """The reason why the log's latencies cannot be predicted, or ""."""
        bad = [row for row in self.rows if not row.is_good]
        if self.why_not or not bad:
            return self.why_not
        worst = max(bad, key=lambda row: abs(row.error) - row.bound)
        text = (
            f"{len(bad)} of {len(self.rows)} latencies of held-out halves are predicted wrongly, the worst: "
            f"{worst.name.replace('_', ' ')} of the {worst.half} half is {100 * worst.error:+.0f} %, with a "
            f"bound of {100 * worst.bound:.0f} %"
        )
        if 1 / STEADY <= self.slowdown <= STEADY:
            return text
        slow, fast, times = "even", "odd", self.slowdown
        if times < 1.0:
            slow, fast, times = "odd", "even", 1 / times
        how = f"took {times:.2f} times as long as equal steps of the {fast} half"
        return f"{text}; steps of the {slow} half {how}"

    def error_of(self, name: str) -> float | None:
        """Return the largest error of the latency `name`, as a fraction, or None if this latency was not
        compared.
        """
        return max((abs(row.error) for row in self.rows if row.name == name), default=None)


def calibrate(script: Script, measured: Measured, acceptance: float, *, overlaps: bool) -> Calibration:
    """Compare each half of the log with simulations whose step times come from the other half. `overlaps`:
    whether the log's engine worked while the device computed.
    """
    count = len(script.requests)
    if count < 2 * MIN_REQUESTS:
        return Calibration(why_not=f"the log has {count} requests; two halves need {2 * MIN_REQUESTS}")
    slices = slices_of(count)
    is_even = slices % 2 == 1
    steps = _halves(measured, slices)
    if min(map(len, steps)) < MIN_STEPS:
        few = min(map(len, steps))
        return Calibration(why_not=f"one half of the log has {few} timed steps; a fit needs {MIN_STEPS}")
    logged = [_latencies(measured.meter, half) for half in (~is_even, is_even)]
    rows: list[HeldOut] = []
    for place, (name, half) in enumerate((("odd", ~is_even), ("even", is_even))):
        times = fit_times(steps[1 - place], overlaps=overlaps)
        runs = [simulate(script, times, acceptance, seed) for seed in SEEDS]
        if runs[0].num_refused:
            return Calibration(why_not=f"the log's own settings refuse {runs[0].num_refused} of its requests")
        found = [_latencies(run.meter, half) for run in runs]
        for each, value in logged[place].items():
            predicted = float(np.median([latencies[each] for latencies in found]))
            rows.append(HeldOut(name, each, value, predicted, logged[1 - place][each]))
    return Calibration(tuple(rows), slowdown=_slowdown(steps, overlaps))


def slices_of(count: int) -> np.ndarray:
    """Return the slice index of each request, in the order of arrival. The number of slices is even,
    and a slice has at least MIN_REQUESTS requests.
    """
    num_slices = 2 * max(1, min(count // MIN_REQUESTS, MAX_SLICES) // 2)
    return np.arange(count) * num_slices // count


def _halves(measured: Measured, slices: np.ndarray) -> tuple[list[TimedStep], list[TimedStep]]:
    """Return the steps in the odd slices and the steps in the even slices. A slice begins with its first
    arrival. The time after the last arrival is divided into slices of mean length, so that both halves get
    steps even if the engine was overloaded.
    """
    begins_ns = measured.meter.arrived_ns[np.flatnonzero(np.diff(slices)) + 1]
    length_ns, end_ns = int(begins_ns[-1]) // len(begins_ns), measured.steps[-1].end_ns
    if length_ns > 0:
        further_ns = np.arange(int(begins_ns[-1]) + length_ns, end_ns, max(length_ns, end_ns // MAX_PARTS))
        begins_ns = np.concatenate((begins_ns, further_ns))
    halves: tuple[list[TimedStep], list[TimedStep]] = [], []
    ends_ns = [step.end_ns for step in measured.steps]
    for step, index in zip(measured.steps, np.searchsorted(begins_ns, ends_ns).tolist(), strict=True):
        halves[index % 2].append(step)
    return halves


def _slowdown(steps: tuple[list[TimedStep], list[TimedStep]], overlaps: bool) -> float:
    cost = fit_times(steps[0] + steps[1], overlaps=overlaps).cost
    speeds = []
    for half in steps:
        own_ns, fitted_ns = own_times(half, cost, overlaps=overlaps)
        speeds.append((own_ns.sum() + sum(step.pause_ns for step in half)) / fitted_ns.sum())
    return float(speeds[1] / speeds[0])


def _latencies(meter: Meter, among: np.ndarray) -> dict[str, float]:
    spreads = meter.ttft(among), meter.inter_token(among), meter.end_to_end(among)
    return {
        f"{name}_{share}": getattr(spread, share) / 1e6
        for name, spread in zip(LATENCIES, spreads, strict=True)
        for share in ALLOWED
    }
