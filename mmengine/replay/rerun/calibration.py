"""Measures how well a simulation predicts a log. Each half of the log is predicted from the other half.

The requests are divided by their arrival into two halves. Step times are fitted to the steps of one half, and
the whole log is simulated with these times. The latencies of the other half's requests are then compared with
the logged latencies. A prediction is trusted if the error of every latency is within a bound.
"""

from dataclasses import dataclass

import numpy as np

from mmengine.replay.rerun.measurement import Measured
from mmengine.replay.rerun.script import Script
from mmengine.replay.rerun.simulation import LATENCIES, simulate
from mmengine.replay.rerun.step_times import TimedStep, fit_times
from mmengine.simulation.meter import Meter

MIN_REQUESTS = 10  # Minimum number of requests in each half.
MIN_STEPS = 25  # Minimum number of timed steps in each half.
ALLOWED = {"p50": 0.10, "p99": 0.20}  # Relative errors that are always accepted.
OF_DIFFERENCE = 1.5  # An error may also be this many times the relative difference between the logged halves.


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A latency in the half that was left out when the step times were fitted. `half`: "first" or "second".
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
    """The comparisons of simulated and logged latencies. `why_not`: the reason why nothing could be compared,
    or "".
    """

    rows: tuple[HeldOut, ...] = ()
    why_not: str = ""

    @property
    def refusal(self) -> str:
        """The reason why the log's latencies cannot be predicted, or ""."""
        bad = [row for row in self.rows if not row.is_good]
        if self.why_not or not bad:
            return self.why_not
        worst = max(bad, key=lambda row: abs(row.error) - row.bound)
        return (
            f"{len(bad)} of {len(self.rows)} latencies of held-out halves are predicted wrongly, the worst: "
            f"{worst.name.replace('_', ' ')} of the {worst.half} half is {100 * worst.error:+.0f} %, with a "
            f"bound of {100 * worst.bound:.0f} %"
        )

    def error_of(self, name: str) -> float | None:
        """Return the largest error of a latency, as a fraction, or None if it was not compared."""
        return max((abs(row.error) for row in self.rows if row.name == name), default=None)


def calibrate(script: Script, measured: Measured, acceptance: float, *, overlaps: bool) -> Calibration:
    """Compare each half of the log with a simulation whose step times come from the other half. `overlaps`:
    see StepTimes.
    """
    count = len(script.requests)
    if count < 2 * MIN_REQUESTS:
        return Calibration(why_not=f"the log has {count} requests; two halves need {2 * MIN_REQUESTS}")
    is_second = np.arange(count) >= count // 2
    steps = _halves(measured, int(measured.meter.arrived_ns[count // 2]))
    if min(map(len, steps)) < MIN_STEPS:
        few = min(map(len, steps))
        return Calibration(why_not=f"one half of the log has {few} timed steps; a fit needs {MIN_STEPS}")
    logged = [_latencies(measured.meter, half) for half in (~is_second, is_second)]
    rows: list[HeldOut] = []
    for place, (name, half) in enumerate((("first", ~is_second), ("second", is_second))):
        done = simulate(script, fit_times(steps[1 - place], overlaps=overlaps), acceptance)
        if done.num_refused:
            return Calibration(why_not=f"the log's own settings refuse {done.num_refused} of its requests")
        found = _latencies(done.meter, half)
        rows += [
            HeldOut(name, each, logged[place][each], found[each], logged[1 - place][each]) for each in found
        ]
    return Calibration(tuple(rows))


def _halves(measured: Measured, middle_ns: int) -> tuple[list[TimedStep], list[TimedStep]]:
    before = [step for step in measured.steps if step.end_ns <= middle_ns]
    return before, measured.steps[len(before) :]


def _latencies(meter: Meter, among: np.ndarray) -> dict[str, float]:
    spreads = meter.ttft(among), meter.inter_token(among), meter.end_to_end(among)
    return {
        f"{name}_{share}": getattr(spread, share) / 1e6
        for name, spread in zip(LATENCIES, spreads, strict=True)
        for share in ALLOWED
    }
