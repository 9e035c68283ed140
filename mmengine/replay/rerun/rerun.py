"""What-if simulation: runs the requests of a log with other settings. Step durations come from a cost model
that is fitted to the log.

Requests arrive, are cancelled and get their grammars as in the log, and get the same answers. The scheduler
is the engine's own. The log's own settings are simulated as well. The comparison with the logged figures
shows the error of the estimate.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.request_checks import check_request
from mmengine.core.decide.scheduler import DECISION_VERSION
from mmengine.core.state.request_state import request_of
from mmengine.errors import ConfigError, InvalidRequest, LogError, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.rerun.fit import FitError, FittedCost, fit, held_out_error
from mmengine.replay.rerun.measurement import MAX_REQUESTS, Measured, Watch
from mmengine.replay.rerun.playback import Playback, Timer
from mmengine.replay.rerun.script import Script, read_script
from mmengine.replay.rerun.scripted_executor import ScriptedExecutor
from mmengine.replay.timeline import open_log
from mmengine.simulation.meter import Meter

MIN_STEPS = 50


@dataclass(slots=True)
class Estimate:
    """The figures of a run by name. Latencies are in ms. `notes`: remarks about the run."""

    numbers: dict[str, float]
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Rerun:
    """The result of a rerun. `again`: the simulation with the log's own settings. `what_if`: the simulation
    with the changed settings. `errors`: the relative error of each figure in `again` compared with `logged`,
    as a fraction, or None if the logged figure is 0.
    """

    logged: Estimate
    again: Estimate
    what_if: Estimate
    changed: dict[str, tuple[object, object]]
    fit_error: FitError
    prices: FittedCost
    notes: list[str]

    @property
    def errors(self) -> dict[str, float | None]:
        pairs = {name: (value, self.again.numbers[name]) for name, value in self.logged.numbers.items()}
        return {name: again / value - 1.0 if value else None for name, (value, again) in pairs.items()}


def rerun(
    folder: Path,
    changes: dict[str, object],
    progress: Callable[[str], None] = lambda text: None,
    findings: Findings | None = None,
) -> Rerun:
    """Simulate a log with its own settings, and again with changed settings. `changes`: new values by the
    field names of EngineConfig. `findings`: see CheckedLog.

    Raises ConfigError for invalid settings. Raises LogError for a log that is too short to fit a cost model,
    and for a log that a host scheduled asynchronously. Also raises `verify`'s errors.
    """
    timeline = open_log(folder)
    if timeline.started.host and timeline.config.max_in_flight > 1:
        raise LogError(
            f"{timeline.started.host} scheduled this log asynchronously (max_in_flight "
            f"{timeline.config.max_in_flight}); rerun simulates its rules only with max_in_flight 1, where "
            "each result is known before the next call, so the estimate would be of another schedule"
        )
    config = _changed(timeline.config, changes)
    watch = Watch(timeline.config, _count_requests(folder))
    progress("reading the log")
    script = read_script(folder, watch.see, findings)
    measured = watch.measured
    cost, error = _fit(measured, folder)
    acceptance = _acceptance(measured, timeline.config, config)
    script, notes = _whole(script)
    if timeline.started.decision_version != DECISION_VERSION:
        notes.append(
            f"logged under decision version {timeline.started.decision_version}; both simulations decide by "
            f"version {DECISION_VERSION}"
        )
    progress("simulating the log's own settings")
    again = _simulate(script, cost, acceptance)
    progress("simulating the other settings")
    what_if = _simulate(replace(script, config=config), cost, acceptance)
    changed = {name: (getattr(timeline.config, name), getattr(config, name)) for name in changes}
    return Rerun(_logged(measured), again, what_if, changed, error, cost, notes)


def _changed(config: EngineConfig, changes: dict[str, object]) -> EngineConfig:
    changed = EngineConfig.from_dict({**config.as_dict(), **changes})
    changed.check_resolved()
    return changed


def _count_requests(folder: Path) -> int:
    log = CheckedLog(folder)
    count = len(log.first_state().requests)
    count += sum(isinstance(record.event, ev.Queued) for record in log)
    if count > MAX_REQUESTS:
        raise LogError(f"the log in {folder} has {count} requests; the limit is {MAX_REQUESTS}")
    return count


def _fit(measured: Measured, folder: Path) -> tuple[FittedCost, FitError]:
    if len(measured.work) < MIN_STEPS:
        raise LogError(
            f"the log in {folder} has {len(measured.work)} timed steps; a cost model needs at least "
            f"{MIN_STEPS}, with prompts and with answers"
        )
    work, device_ns = np.array(measured.work), np.array(measured.device_ns, np.float64)
    host = np.zeros(2)
    host_ns = np.array(measured.host_ns, np.float64)
    if len(host_ns) and np.median(host_ns) > 0:
        rows = np.array(measured.host_rows, np.float64)
        host = fit(np.stack((np.ones(len(rows)), rows), axis=1), np.maximum(host_ns, 1.0))
    return FittedCost(fit(work, device_ns), host), held_out_error(work, device_ns)


def _acceptance(measured: Measured, logged: EngineConfig, config: EngineConfig) -> float:
    """Return the acceptance rate: accepted drafts as a fraction of compared drafts. In each row, drafts are
    compared up to and including the first rejected draft.
    """
    tried = measured.num_accepted + measured.num_refused
    if config.num_draft_tokens and not tried:
        raise ConfigError(
            f"num_draft_tokens {config.num_draft_tokens}: the log has no drafts, so their acceptance is "
            f"unknown; leave it at {logged.num_draft_tokens}"
        )
    return measured.num_accepted / tried if tried else 0.0


def _whole(script: Script) -> tuple[Script, list[str]]:
    """Return a script in which each request ends, and notes about everything in the log that cannot be
    repeated.
    """
    notes, unfinished = [], set(script.unfinished)
    observations = []
    for each in script.observations:
        event = each.event
        if isinstance(event, ev.Queued) and event.request_id in unfinished:
            least = min(1, event.sampling.max_tokens)
            count = max(least, len(script.answers[event.request_id].tokens))
            sampling = msgspec.structs.replace(event.sampling, max_tokens=count, min_tokens=0)
            each = replace(each, event=msgspec.structs.replace(event, sampling=sampling))
        observations.append(each)
    if unfinished:
        notes.append(
            f"{len(unfinished)} requests have no end in the log; here they end with their last token"
        )
    if script.num_rejected:
        notes.append(f"{script.num_rejected} arrivals that found the queue full are not in the log")
    if script.failed_steps:
        notes.append(f"{len(script.failed_steps)} steps failed in the log; none fails in the simulations")
    if any(isinstance(each.event, ev.Recovered) for each in observations):
        notes.append("the log contains a crash; the simulations do not")
    return replace(script, observations=observations), notes


def _simulate(script: Script, cost: FittedCost, acceptance: float) -> Estimate:
    notes = []
    refused, reason = _refused(script)
    kept = [o for o in script.observations if getattr(o.event, "request_id", "") not in refused]
    if refused:
        notes.append(f"{len(refused)} requests are refused, the first: {reason}")
    meter = Meter(len(script.requests), script.config.max_num_seqs)
    start_ns = script.observations[0].time_ns if script.observations else 0
    for each in kept:
        if isinstance(each.event, ev.Queued):
            meter.arrived(each.event.request_id, len(each.event.prompt) // 4, each.time_ns - start_ns)
    executor = ScriptedExecutor(
        script.config,
        script.answers,
        cost=cost,
        host_ns=cost.host_ns,
        observers=(meter,),
        acceptance=acceptance,
    )

    def see(event: ev.Event) -> None:
        if isinstance(event, ev.Preempted):
            meter.preempted()
        elif isinstance(event, ev.Finished):
            meter.finished(event.request_id, event.reason, executor.clock_ns)

    playback = Playback(script.config, kept, executor, timer=Timer(executor, start_ns), see=see)
    try:
        while playback.step() is not None:
            pass
    except MMEngineError as error:
        notes.append(f"the engine stops: {error}")
    stats = playback.core.stats()
    numbers = _numbers(meter, executor.clock_ns, stats.steps, stats.num_encoder_hits)
    return Estimate(numbers, notes)


def _refused(script: Script) -> tuple[set[str], str]:
    """Return the ids of requests that the script's settings would refuse, and the reason for the first of
    them.
    """
    names, reason = set(), ""
    for event in script.requests:
        try:
            check_request(request_of(event), script.config)
        except InvalidRequest as error:
            names.add(event.request_id)
            reason = reason or f"{event.request_id}: {error}"
    return names, reason


def _logged(measured: Measured) -> Estimate:
    return Estimate(
        _numbers(measured.meter, measured.duration_ns, measured.num_steps, measured.num_encoder_hits)
    )


def _numbers(meter: Meter, duration_ns: int, num_steps: int, num_encoder_hits: int) -> dict[str, float]:
    seconds = duration_ns / 1e9
    ran = meter.num_cached >= 0
    num_prompt, items = int(meter.num_prompt[ran].sum()), num_encoder_hits + meter.num_encoded
    numbers: dict[str, float] = {}
    for name, spread in (
        ("ttft_ms", meter.ttft()),
        ("inter_token_ms", meter.inter_token()),
        ("end_to_end_ms", meter.end_to_end()),
    ):
        numbers |= {f"{name}_{each}": getattr(spread, each) / 1e6 for each in ("p50", "p90", "p99")}
    return numbers | {
        "tokens_per_s": meter.num_output_tokens / seconds if seconds else 0.0,
        "requests_per_s": sum(meter.ends.get(end, 0) for end in ev.ANSWERED) / seconds if seconds else 0.0,
        "duration_s": seconds,
        "steps": num_steps,
        "output_tokens": meter.num_output_tokens,
        "preemptions": meter.num_preemptions,
        "prefix_hit_percent": 100.0 * int(meter.num_cached[ran].sum()) / num_prompt if num_prompt else 0.0,
        "encoder_hit_percent": 100.0 * num_encoder_hits / items if items else 0.0,
    }


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
