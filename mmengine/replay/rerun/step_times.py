"""A model of step times, fitted to a log's steps. A step takes (fitted time for its work) * slowness * ratio
+ pause. Slowness: how slow the machine was around the step. Ratio: the step's own deviation. For a step that
an arriving request delays, the ratio is the class's usual ratio, and a delay is added. `resampling.py`
samples slowness, ratio, pause and delay from the log.
"""

from dataclasses import dataclass

import numpy as np

from mmengine.replay.rerun.fit import KINDS, FittedCost, StepWork, fit

# A step's phase. PLAIN: no request is being prepared (tokenized, media decoded) during the step. DURING: a
# request arrives during the step. BEFORE: a request is being prepared during the step, and arrives shortly
# after the step.
PLAIN, DURING, BEFORE = range(3)
MIN_DELAYED = 20  # Delays are fitted only to at least this many steps.
PER_OCTAVE = 2  # Number of step classes for each doubling of the step size.
DECODE = KINDS.index("decode")
SLOWNESS_STEPS = 32  # The machine's slowness is a median over this many consecutive steps.
BEGUN_NS = 250_000_000  # Maximum for StepTimes.busy_ns.


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in the log. `device_ns`: the step's time on the device. `host_ns`: the time that the engine
    spent around the step while the device was idle, or -1 if unknown. `pause_ns`: time in which the process
    did not run. `end_ns`: the time at which the result returned. `is_first`: whether the engine was idle
    before the step. `has_arrival`: whether a request arrived during the step.
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
    """The fitted costs, and each logged step's deviation from its fitted time.

    `classes`: the step's class; the steps of a class have the same kind and a similar size. `slowness`: the
    machine's slowness around the step, relative to the median step (1.0). `ratios`: the step's time without
    its pause, divided by its fitted time and by the slowness. `usual`: for each class, the mean ratio of its
    plain steps. `pauses_ns`: the step's pause. `busy_ns`: how long the engine had been busy before the step,
    at most BEGUN_NS. `ends_ns`: when the step ended. `is_plain`: whether no request was being prepared. The
    arrays among these fields have an entry for each logged step.

    `delays_ns`: (phase, kind of step) -> the steps' delays, divided by the slowness. The phase is DURING or
    BEFORE. `delayed_ns`: the durations of these delayed steps, with pauses, for each key in `delays_ns`.
    `arrivals_per_ns`: how often requests arrive while the engine is busy; requests that arrive during the
    same step count once. `lead_ns`: a step has the phase BEFORE if a request arrives within this time after
    the step.

    `overlaps`: whether the log's engine worked while the device computed. With overlap, ratios compare device
    times only. Otherwise, ratios compare device plus host times.
    """

    cost: FittedCost
    classes: np.ndarray
    slowness: np.ndarray
    ratios: np.ndarray
    usual: dict[int, float]
    pauses_ns: np.ndarray
    busy_ns: np.ndarray
    ends_ns: np.ndarray
    is_plain: np.ndarray
    delays_ns: dict[tuple[int, int], np.ndarray]
    delayed_ns: dict[tuple[int, int], np.ndarray]
    arrivals_per_ns: float
    lead_ns: float
    overlaps: bool


def class_of(kind: np.ndarray | int, num_rows: np.ndarray | int, fitted_ns: np.ndarray | float) -> np.ndarray:
    """Return each step's class. Decode steps are classed by rows, and other steps by fitted times."""
    sizes = np.where(np.asarray(kind) == DECODE, num_rows, np.maximum(fitted_ns, 1.0))
    return np.asarray(1000 * np.asarray(kind) + np.round(PER_OCTAVE * np.log2(sizes)), np.int64)


def fit_times(steps: list[TimedStep], *, overlaps: bool) -> StepTimes:
    """Fit the costs to a log's steps. `overlaps`: see StepTimes."""
    cost = _fit_cost(steps)
    own_ns, fitted_ns = own_times(steps, cost, overlaps=overlaps)
    pauses_ns = np.array([each.pause_ns for each in steps], np.float64)
    phases = _phases(steps, overlaps)
    kinds, rows = np.array([(each.work.kind, each.work.num_rows) for each in steps]).T
    classes = class_of(kinds, rows, fitted_ns)
    is_plain = phases == PLAIN
    has_delays = (phases == DURING).sum() >= MIN_DELAYED and is_plain.sum() >= MIN_DELAYED
    if not has_delays:
        is_plain = np.ones(len(steps), bool)
    slowness = _slowness(own_ns / fitted_ns, classes, is_plain)
    ratios = own_ns / (fitted_ns * slowness)
    usual = {
        int(name): float(ratios[is_plain & (classes == name)].mean()) for name in np.unique(classes[is_plain])
    }
    delays_ns: dict[tuple[int, int], np.ndarray] = {}
    delayed_ns: dict[tuple[int, int], np.ndarray] = {}
    lead_ns = arrivals_per_ns = 0.0
    if has_delays:
        expected = np.array([usual.get(name, np.nan) for name in classes.tolist()])
        is_known = ~np.isnan(expected)
        delays_ns = _by_phase(fitted_ns * (ratios - expected), kinds, phases, is_known)
        delayed_ns = _by_phase(own_ns + pauses_ns, kinds, phases, is_known)
        arrivals_per_ns = _arrival_rate(own_ns + pauses_ns, phases == DURING)
        lead_ns = float(np.median((own_ns + pauses_ns)[phases == DURING]))
    return StepTimes(
        cost,
        classes,
        slowness,
        ratios,
        usual,
        pauses_ns,
        _busy_times(steps, own_ns + pauses_ns),
        np.array([each.end_ns for each in steps]),
        is_plain,
        delays_ns,
        delayed_ns,
        arrivals_per_ns,
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
    """Return PLAIN, DURING or BEFORE for each step. If the engine works while the device computes
    (`overlaps`), arrivals delay no step.
    """
    arrived = np.array([each.has_arrival and not overlaps for each in steps])
    is_first = np.array([each.is_first for each in steps])
    follows = np.append(arrived[1:] & ~is_first[1:], False)
    return np.where(arrived, DURING, np.where(follows, BEFORE, PLAIN))


def _slowness(ratios: np.ndarray, classes: np.ndarray, is_plain: np.ndarray) -> np.ndarray:
    """Return the machine's slowness around each step. Each ratio is divided by the median ratio in its class.
    The slowness is the median over SLOWNESS_STEPS consecutive plain steps.
    """
    plain = np.flatnonzero(is_plain)
    relative = ratios[plain].copy()
    for name in np.unique(classes[plain]):
        these = classes[plain] == name
        relative[these] /= np.median(relative[these])
    parts = np.array_split(relative, max(1, len(plain) // SLOWNESS_STEPS))
    slowness = np.array([np.median(part) for part in parts])
    lasts = plain[np.cumsum([len(part) for part in parts]) - 1]
    part = np.minimum(np.searchsorted(lasts, np.arange(len(ratios))), len(parts) - 1)
    return np.asarray(slowness[part])


def _arrival_rate(lengths_ns: np.ndarray, has_arrival: np.ndarray) -> float:
    """Return the arrival rate per ns. At this rate, the expected number of steps with an arrival equals the
    logged number. Steps before the first arrival and after the last arrival do not count.
    """
    places = np.flatnonzero(has_arrival)
    lengths_ns = lengths_ns[places[0] : places[-1] + 1]
    low, high = 0.0, 100.0 / float(np.median(lengths_ns))
    for _ in range(50):
        rate = (low + high) / 2
        is_low = -np.expm1(-rate * lengths_ns).sum() < len(places)
        low, high = (rate, high) if is_low else (low, rate)
    return high


def _by_phase(
    values: np.ndarray, kinds: np.ndarray, phases: np.ndarray, is_known: np.ndarray
) -> dict[tuple[int, int], np.ndarray]:
    """Return the known values of delayed steps by (phase, kind). A kind with fewer than MIN_DELAYED values
    gets the values of all kinds.
    """
    found: dict[tuple[int, int], np.ndarray] = {}
    for phase in (DURING, BEFORE):
        every = values[is_known & (phases == phase)]
        if len(every) < MIN_DELAYED:
            continue
        for kind in range(len(KINDS)):
            these = values[is_known & (phases == phase) & (kinds == kind)]
            found[phase, kind] = these if len(these) >= MIN_DELAYED else every
    return found


def _busy_times(steps: list[TimedStep], lengths_ns: np.ndarray) -> np.ndarray:
    busy_ns, since_ns = np.zeros(len(steps)), 0.0
    for index, each in enumerate(steps):
        since_ns = 0.0 if each.is_first else since_ns
        busy_ns[index] = min(since_ns, BEGUN_NS)
        since_ns += lengths_ns[index]
    return busy_ns
