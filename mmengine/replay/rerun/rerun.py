"""Predicts a log's latencies under other settings, with an interval for each figure.

If the settings lead to the logged decisions, the logged latencies are the exact result. Otherwise the log's
requests are simulated with the engine's scheduler and with step times fitted to the log. A simulated result
is returned only if each half of the log can be predicted from the other half.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.errors import ConfigError, LogError
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.rerun.calibration import SEEDS, Calibration, calibrate
from mmengine.replay.rerun.fit import FitError, FittedCost, held_out_error
from mmengine.replay.rerun.measurement import MAX_REQUESTS, Measured, PricedWatch, Watch
from mmengine.replay.rerun.resampling import DrawnTimes
from mmengine.replay.rerun.same_decisions import compare_decisions
from mmengine.replay.rerun.script import Script, read_script
from mmengine.replay.rerun.simulation import (
    Estimate,
    complete_script,
    numbers_of,
    simulate,
    with_logged_drafts,
)
from mmengine.replay.rerun.step_times import StepTimes, fit_times
from mmengine.replay.timeline import fold, open_log

MIN_STEPS = 50
Interval = tuple[float, float]


class NoPrediction(LogError):
    """Raised if latencies cannot be predicted from the log."""


@dataclass(slots=True)
class Rerun:
    """The result of a rerun.

    `is_exact`: whether the settings lead to the logged decisions (False: simulated). `again`: the estimate
    for the log's own settings with modelled step times. `what_if`: the estimate for the changed settings;
    None if the estimate was refused, for the reason in `refusal`. `intervals`: the lowest and highest value
    to expect for each figure in `what_if`. `errors`: the relative error of each figure in `again` compared
    with `logged`, as a fraction, or None if the logged figure is 0.
    """

    is_exact: bool
    logged: Estimate
    again: Estimate
    what_if: Estimate | None
    changed: dict[str, tuple[object, object]]
    fit_error: FitError
    prices: FittedCost
    calibration: Calibration
    refusal: str = ""
    intervals: dict[str, Interval] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> dict[str, float | None]:
        pairs = {name: (value, self.again.numbers[name]) for name, value in self.logged.numbers.items()}
        return {name: again / value - 1.0 if value else None for name, (value, again) in pairs.items()}


def rerun(
    folder: Path,
    changes: dict[str, object],
    progress: Callable[[str], None] = lambda text: None,
    findings: Findings | None = None,
    exact: bool | None = None,
) -> Rerun:
    """Return a log's latencies with changed settings. `changes`: new values by the field names of
    EngineConfig.

    `exact`: True raises NoPrediction if the settings lead to other decisions. None simulates in this case.
    False always simulates. `findings`: see CheckedLog.

    Raises ConfigError for invalid settings, and NoPrediction if latencies cannot be predicted from the log.
    Raises the same errors as mmengine.replay.verify.
    """
    timeline = open_log(folder)
    logged, config = timeline.config, _changed(timeline.config, changes)
    count = _count_requests(folder)
    watch = Watch(logged, count)
    progress("reading the log")
    script = read_script(folder, watch.see, findings)
    measured = watch.measured
    _check_steps(measured, folder)
    acceptance = _acceptance(measured, logged, config)
    progress("deciding the log's steps again")
    same = compare_decisions(folder, config) if exact is not False else None
    if exact and same is not None and not same.is_same:
        raise NoPrediction(f"with these settings {same.why}; without --exact rerun simulates them")
    times = fit_times(measured.steps, overlaps=logged.max_in_flight > 1)
    result = Rerun(
        same is not None and same.is_same,
        _logged(measured),
        Estimate({}),
        None,
        {name: (getattr(logged, name), getattr(config, name)) for name in changes},
        held_out_error(
            np.array([each.work.amounts for each in measured.steps]),
            np.array([each.device_ns for each in measured.steps], np.float64),
        ),
        times.cost,
        Calibration(),
    )
    if result.is_exact:
        result.again, result.what_if = _priced(folder, times, measured, logged), result.logged
        return result
    script, result.notes = _simulable(script, timeline.started)
    if same is not None and not changes:
        result.notes.append(f"the log's own decisions are not reproduced: {same.why}")
    if config.draft_policy == logged.draft_policy:
        config = with_logged_drafts(config)
    _simulate(result, script, config, measured, times, acceptance, progress)
    return result


def _simulable(script: Script, started: ev.Started) -> tuple[Script, list[str]]:
    """Return the script to simulate, and notes for the user. Raises NoPrediction for a log whose schedule
    cannot be simulated.
    """
    if started.host and script.config.max_in_flight > 1:
        raise NoPrediction(
            f"{started.host} scheduled this log asynchronously (max_in_flight "
            f"{script.config.max_in_flight}); rerun simulates its rules only with max_in_flight 1, where "
            "each result is known before the next call, so the estimate would be of another schedule"
        )
    if started.host and script.config.block_groups:
        raise NoPrediction(
            f"{started.host} scheduled this log with {script.config.num_groups} KV groups; rerun does not "
            "simulate its rules for several KV groups, so the estimate would be of another schedule"
        )
    script, notes = complete_script(script)
    if started.decision_version != DECISION_VERSION:
        notes.append(
            f"logged under decision version {started.decision_version}; all simulations decide by "
            f"version {DECISION_VERSION}"
        )
    return script, notes


def _simulate(
    result: Rerun,
    script: Script,
    config: EngineConfig,
    measured: Measured,
    times: StepTimes,
    acceptance: float,
    progress: Callable[[str], None],
) -> None:
    """Calibrate the simulation, and store its estimate for `config`, or the reason to refuse an estimate."""
    progress("predicting the halves of the log from each other")
    result.calibration = calibrate(script, measured, acceptance, overlaps=times.overlaps)
    result.refusal = result.calibration.refusal
    progress("simulating the log's own settings")
    result.again = simulate(script, times, acceptance, SEEDS[0]).estimate
    if not result.refusal:
        progress("simulating the other settings")
        _predict(result, script, config, times, acceptance)


def _changed(config: EngineConfig, changes: dict[str, object]) -> EngineConfig:
    changed = EngineConfig.from_dict({**config.as_dict(), **changes})
    if changes:
        changed.check_resolved()
    return changed


def _count_requests(folder: Path) -> int:
    log = CheckedLog(folder)
    count = len(log.first_state().requests)
    count += sum(isinstance(record.event, ev.Queued) for record in log)
    if count > MAX_REQUESTS:
        raise LogError(f"the log in {folder} has {count} requests; the limit is {MAX_REQUESTS}")
    return count


def _check_steps(measured: Measured, folder: Path) -> None:
    if len(measured.steps) < MIN_STEPS:
        raise NoPrediction(
            f"the log in {folder} has {len(measured.steps)} timed steps; a cost model needs at least "
            f"{MIN_STEPS}, with prompts and with answers"
        )


def _acceptance(measured: Measured, logged: EngineConfig, config: EngineConfig) -> float:
    """Return the acceptance rate: accepted drafts as a fraction of compared drafts. A row's drafts are
    compared up to and including the first rejected draft.
    """
    tried = measured.num_accepted + measured.num_refused
    if config.num_draft_tokens and not tried and config.num_draft_tokens != logged.num_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens {config.num_draft_tokens}: the log has no drafts, so their acceptance is "
            f"unknown; leave it at {logged.num_draft_tokens}"
        )
    return measured.num_accepted / tried if tried else 0.0


def _priced(folder: Path, times: StepTimes, measured: Measured, config: EngineConfig) -> Estimate:
    """Return the log's figures with modelled step times and the log's decisions."""
    drawn = DrawnTimes(times, np.random.default_rng(SEEDS[0]), overlaps=times.overlaps)
    watch = PricedWatch(config, len(measured.meter.arrived_ns), drawn, measured.steps)
    log = CheckedLog(folder, findings=Findings())
    for state, record in fold(log):
        with log.naming(record):
            watch.see(state, record)
    return _logged(watch.measured)


def _predict(
    result: Rerun, script: Script, config: EngineConfig, times: StepTimes, acceptance: float
) -> None:
    """Simulate the script under `config` with several seeds. Store the first estimate, and intervals that
    cover all estimates and the calibration's errors.
    """
    is_simulated = config == script.config  # Then `again` already has the first estimate.
    script = replace(script, config=config)
    first = result.again if is_simulated else simulate(script, times, acceptance, SEEDS[0]).estimate
    runs = [first, *(simulate(script, times, acceptance, seed).estimate for seed in SEEDS[1:])]
    result.what_if = first
    for name in runs[0].numbers:
        values = [run.numbers[name] for run in runs]
        error = result.calibration.error_of(name)
        if error is None:
            error = abs(result.errors[name] or 0.0)
        result.intervals[name] = min(values) * max(0.0, 1.0 - error), max(values) * (1.0 + error)


def _logged(measured: Measured) -> Estimate:
    return Estimate(
        numbers_of(measured.meter, measured.duration_ns, measured.num_steps, measured.num_encoder_hits)
    )


def read_changes(pairs: list[str]) -> dict[str, object]:
    """Parse `name=value` pairs as settings. A value that is not valid JSON is a string. Raises ConfigError
    for a pair without "=".
    """
    changes: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{pair!r} is not a setting; write it as name=value")
        try:
            changes[name.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            changes[name.strip()] = value
    return changes
