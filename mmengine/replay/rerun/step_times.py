"""Step times, fitted to a log's steps. A step's time is the fitted time of its work, multiplied by a ratio,
plus a pause, plus a delay if a request arrives meanwhile. `resampling.py` draws these parts from the log.
"""

from dataclasses import dataclass

import numpy as np

from mmengine.replay.rerun.fit import KINDS, FittedCost, StepWork, fit

# A step's phase. PLAIN: no request is being prepared during the step. DURING: a request arrives during the
# step. BEFORE: a request arrives shortly after the step, so it is prepared during the step.
PLAIN, DURING, BEFORE = range(3)
MIN_DELAYED = 20  # Minimum number of steps with an arrival from which delays are fitted.
PER_OCTAVE = 2  # Number of classes of steps per factor of 2 in their size.
DECODE = KINDS.index("decode")
BEGUN_NS = 250_000_000  # Longer busy times of the engine count as this time.


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in the log. `device_ns`: the step's time on the device. `host_ns`: the time that the engine
    spent around the step while the device was idle, or -1 if unknown. `pause_ns`: further time, in which the
    process did not run. `end_ns`: the time at which the result returned. `is_first`: whether the engine was
    idle before the step. `has_arrival`: whether a request arrived during the step.
    """

    work: StepWork
    device_ns: int
    host_ns: int
    end_ns: int
    pause_ns: int = 0
    is_first: bool = False
    has_arrival: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The fitted costs, and for each step of the log, in order, how the step's time differs from its fitted
    time.

    `classes`: the step's class; the steps of a class have the same kind and a similar size. `ratios`: the
    step's own time as a multiple of its fitted time. `pauses_ns`: the step's pause. `busy_ns`: how long
    the engine had been busy before the step, at most BEGUN_NS. `ends_ns`: when the step ended. `is_plain`:
    whether no request was being prepared. `delays_ns`: quantiles of the delays in steps that are PLAIN,
    DURING or BEFORE. `lead_ns`: the time before an arrival in which steps are BEFORE.

    `overlaps`: whether the log's engine worked while the device computed. With overlap, the ratios compare
    device times; without overlap, they compare the sums of device and host times.
    """

    cost: FittedCost
    classes: np.ndarray
    ratios: np.ndarray
    pauses_ns: np.ndarray
    busy_ns: np.ndarray
    ends_ns: np.ndarray
    is_plain: np.ndarray
    delays_ns: tuple[np.ndarray, ...]
    lead_ns: float
    overlaps: bool


def class_of(kind: np.ndarray | int, num_rows: np.ndarray | int, fitted_ns: np.ndarray | float) -> np.ndarray:
    """Return the class of steps: decode steps by their rows, and other steps by their fitted times."""
    sizes = np.where(np.asarray(kind) == DECODE, num_rows, np.maximum(fitted_ns, 1.0))
    return np.asarray(1000 * np.asarray(kind) + np.round(PER_OCTAVE * np.log2(sizes)), np.int64)


def fit_times(steps: list[TimedStep], *, overlaps: bool) -> StepTimes:
    """Fit the costs to a log's steps. `overlaps`: see StepTimes."""
    cost = _fit_cost(steps)
    own_ns, fitted_ns = own_times(steps, cost, overlaps=overlaps)
    pauses_ns = np.array([each.pause_ns for each in steps], np.float64)
    phases = _phases(steps, overlaps)
    is_plain = phases == PLAIN
    kinds, rows = np.array([(each.work.kind, each.work.num_rows) for each in steps]).T
    classes = class_of(kinds, rows, fitted_ns)
    delays_ns: tuple[np.ndarray, ...] = (np.zeros(1),) * 3
    lead_ns = 0.0
    if (phases == DURING).sum() >= MIN_DELAYED and is_plain.sum() >= MIN_DELAYED:
        delays_ns = _delays(own_ns, fitted_ns, classes, phases)
        lead_ns = float(np.median((own_ns + pauses_ns)[phases == DURING]))
    else:
        is_plain = np.ones(len(steps), bool)
    return StepTimes(
        cost,
        classes,
        own_ns / fitted_ns,
        pauses_ns,
        _busy_times(steps, own_ns + pauses_ns),
        np.array([each.end_ns for each in steps]),
        is_plain,
        delays_ns,
        lead_ns,
        overlaps,
    )


def own_times(steps: list[TimedStep], cost: FittedCost, *, overlaps: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps' times without pauses, and their fitted times, float64. `overlaps`: see StepTimes."""
    own_ns = np.array([each.device_ns for each in steps], np.float64)
    fitted_ns = np.array([each.work.amounts for each in steps]) @ cost.prices
    if not overlaps:
        host_ns = np.array([each.host_ns for each in steps], np.float64)
        modelled_ns = np.array([cost.host_ns(each.work.num_rows) for each in steps])
        fitted_ns = fitted_ns + modelled_ns
        own_ns = own_ns + np.where(host_ns >= 0, host_ns, modelled_ns)
    return own_ns, np.maximum(fitted_ns, 1.0)


def _fit_cost(steps: list[TimedStep]) -> FittedCost:
    work = np.array([each.work.amounts for each in steps])
    device_ns = np.array([each.device_ns for each in steps], np.float64)
    rows = np.array([each.work.num_rows for each in steps], np.float64)
    host_ns = np.array([each.host_ns for each in steps], np.float64)
    known = host_ns >= 0
    host = np.zeros(2)
    if known.any() and np.median(host_ns[known]) > 0:
        amounts = np.stack((np.ones(int(known.sum())), rows[known]), axis=1)
        host = fit(amounts, np.maximum(host_ns[known], 1.0))
    return FittedCost(fit(work, device_ns), host)


def _phases(steps: list[TimedStep], overlaps: bool) -> np.ndarray:
    """Return PLAIN, DURING or BEFORE for each step. On an asynchronous device arrivals delay no step."""
    arrived = np.array([each.has_arrival and not overlaps for each in steps])
    is_first = np.array([each.is_first for each in steps])
    follows = np.append(arrived[1:] & ~is_first[1:], False)
    return np.where(arrived, DURING, np.where(follows, BEFORE, PLAIN))


def _delays(
    own_ns: np.ndarray, fitted_ns: np.ndarray, classes: np.ndarray, phases: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the quantiles of the delays: by how much the quantiles of delayed steps' times are above those
    of PLAIN steps. Each delayed step is compared with the nearest PLAIN step of its class.
    """
    delays = [np.zeros(1)] * 3
    plain_ns = np.full(len(own_ns), np.nan)
    for name in np.unique(classes[phases == PLAIN]):
        plain = np.flatnonzero((classes == name) & (phases == PLAIN))
        steps = np.flatnonzero(classes == name)
        after = np.minimum(np.searchsorted(plain, steps), len(plain) - 1)
        before = np.maximum(after - 1, 0)
        is_before = steps - plain[before] < np.abs(plain[after] - steps)
        nearest = plain[np.where(is_before, before, after)]
        plain_ns[steps] = fitted_ns[steps] * own_ns[nearest] / fitted_ns[nearest]
    for phase in (DURING, BEFORE):
        these = (phases == phase) & ~np.isnan(plain_ns)
        if these.sum() >= MIN_DELAYED:
            excess_ns = np.sort((own_ns - fitted_ns)[these])
            delays[phase] = excess_ns - np.sort((plain_ns - fitted_ns)[these])
    return tuple(delays)


def _busy_times(steps: list[TimedStep], lengths_ns: np.ndarray) -> np.ndarray:
    busy_ns, since_ns = np.zeros(len(steps)), 0.0
    for index, each in enumerate(steps):
        since_ns = 0.0 if each.is_first else since_ns
        busy_ns[index] = min(since_ns, BEGUN_NS)
        since_ns += lengths_ns[index]
    return busy_ns
