"""Simulates a script (a log's requests) on a simulated clock. Requests arrive at the log's times, the
engine's scheduler decides, and StepTimes gives each step's duration.
"""

from bisect import bisect_right
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.decide.request_checks import check_request
from mmengine.core.executor import StepPlan
from mmengine.core.state.request_state import request_of
from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.replay.rerun.fit import work_of_plan
from mmengine.replay.rerun.playback import Clock, Playback, Timer, WaitingExecutor
from mmengine.replay.rerun.resampling import DrawnTimes
from mmengine.replay.rerun.script import Observation, Script
from mmengine.replay.rerun.scripted_executor import ScriptedExecutor
from mmengine.replay.rerun.step_times import BEFORE, DURING, StepTimes
from mmengine.simulation.meter import Meter

# Maximum time between two consecutive observations of a step that the scheduler saw together.
TOGETHER_NS = 1_000_000
CHOSEN = "goodput"  # The draft_policy with which the scheduler chooses among drafts.
LATENCIES = ("ttft_ms", "inter_token_ms", "end_to_end_ms")


@dataclass(slots=True)
class Estimate:
    """The figures of a run by name. Latencies are in ms. `notes`: remarks about the run."""

    numbers: dict[str, float]
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Simulated:
    """The result of a simulation. `num_refused`: the number of requests that the settings refuse."""

    estimate: Estimate
    meter: Meter
    num_refused: int


def simulate(script: Script, times: StepTimes, acceptance: float, seed: int = 0) -> Simulated:
    """Run a script's requests. `acceptance`: see ScriptedExecutor. `seed`: the seed for arrival times and
    step times.
    """
    notes, config = [], script.config
    refused, reason = _refused(script)
    observations = [o for o in script.observations if getattr(o.event, "request_id", "") not in refused]
    if refused:
        notes.append(f"{len(refused)} requests are refused, the first: {reason}")
    meter = Meter(len(script.requests), config.max_num_seqs)
    start_ns = script.observations[0].time_ns if script.observations else 0
    for each in observations:
        if isinstance(each.event, ev.Queued):
            meter.arrived(each.event.request_id, len(each.event.prompt) // 4, each.time_ns - start_ns)
    rng = np.random.default_rng(seed)
    observations = _arriving(observations, rng)
    drawn = DrawnTimes(times, rng, overlaps=config.max_in_flight > 1)
    prices = _Prices(drawn, [o.time_ns - start_ns for o in observations if isinstance(o.event, ev.Queued)])
    executor = ScriptedExecutor(
        config,
        script.answers,
        cost=prices,
        host_ns=drawn.host_ns,
        observers=(meter,),
        acceptance=acceptance,
    )
    timer = prices.timer = _IdleTimer(executor, start_ns, drawn)

    def see(event: ev.Event) -> None:
        if isinstance(event, ev.Queued):
            meter.seen(event.request_id, executor.clock_ns)
        elif isinstance(event, ev.Preempted):
            meter.preempted()
        elif isinstance(event, ev.Finished):
            meter.finished(event.request_id, event.reason, executor.clock_ns)

    playback = Playback(config, observations, executor, timer=timer, see=see)
    try:
        while playback.step() is not None:
            pass
    except MMEngineError as error:
        notes.append(f"the engine stops: {error}")
    stats = playback.core.stats()
    numbers = numbers_of(meter, executor.clock_ns, stats.steps, stats.num_encoder_hits)
    return Simulated(Estimate(numbers, notes), meter, len(refused))


class _Prices:
    """The durations of simulated steps. A request that arrives during a step delays the step. `arrivals_ns`:
    the times of the arrivals, in order. `timer`: the simulation's clock, set before the first step.
    """

    timer: Clock

    def __init__(self, drawn: DrawnTimes, arrivals_ns: list[int]):
        self._drawn, self._arrivals_ns = drawn, arrivals_ns
        self._announced = -1  # index of the last arrival that has delayed a step

    def price(self, plan: StepPlan, num_embeds: int) -> int:
        now_ns, drawn = self.timer.now(), self._drawn
        step_ns = drawn.step_ns(work_of_plan(plan, num_embeds), now_ns)
        following = bisect_right(self._arrivals_ns, now_ns)
        if following == len(self._arrivals_ns):
            return step_ns
        until_ns = self._arrivals_ns[following] - now_ns
        # The delay prolongs the step, so later arrivals can also fall into the step.
        delay_ns = drawn.delay_ns(DURING, is_certain=False)
        if until_ns >= step_ns + max(0, delay_ns):
            delay_ns = drawn.delay_ns(BEFORE)
            if following <= self._announced or drawn.phase(step_ns + delay_ns, until_ns) != BEFORE:
                delay_ns = 0
            else:
                self._announced = following
        drawn.prolong(delay_ns)
        return max(1, step_ns + delay_ns)


class _IdleTimer(Timer):
    """A clock that calls DrawnTimes.begin each time the engine is idle."""

    def __init__(self, executor: WaitingExecutor, start_ns: int, drawn: DrawnTimes):
        super().__init__(executor, start_ns)
        self._drawn = drawn

    def wait_until(self, due: int) -> None:
        if due > self.now():
            self._drawn.begin()
        super().wait_until(due)


def _arriving(observations: list[Observation], rng: np.random.Generator) -> list[Observation]:
    """Return the observations with earlier times. Each time is reduced by a random share of `slack_ns`,
    because an observation may have arrived up to `slack_ns` before the scheduler saw the observation.
    Observations that the scheduler saw together get the same time.
    """
    result: list[Observation] = []
    last, time_ns = None, 0
    for each in observations:
        if last is None or each.step != last.step or each.time_ns - last.time_ns > TOGETHER_NS:
            time_ns = max(time_ns, each.time_ns - round(rng.random() * each.slack_ns))
        result.append(replace(each, time_ns=time_ns))
        last = each
    return result


def complete_script(script: Script) -> tuple[Script, list[str]]:
    """Return a script in which each request ends, and notes on log contents that cannot be repeated."""
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
    if script.config.draft_policy == CHOSEN:
        notes.append("each request verifies the drafts that it verified in the log; no others are chosen")
    return replace(script, observations=observations, config=with_logged_drafts(script.config)), notes


def with_logged_drafts(config: EngineConfig) -> EngineConfig:
    """Return settings with which a simulation verifies the same drafts as the log. The log's scheduler
    already chose the drafts, so the simulated scheduler must not choose again.
    """
    if config.draft_policy != CHOSEN:
        return config
    return msgspec.structs.replace(config, draft_policy="all")


def _refused(script: Script) -> tuple[set[str], str]:
    """Return the ids of requests that the script's settings would refuse, and the first request's reason."""
    names, reason = set(), ""
    for event in script.requests:
        try:
            check_request(request_of(event), script.config)
        except InvalidRequest as error:
            names.add(event.request_id)
            reason = reason or f"{event.request_id}: {error}"
    return names, reason


def numbers_of(meter: Meter, duration_ns: int, num_steps: int, num_encoder_hits: int) -> dict[str, float]:
    """Return a run's figures by name."""
    seconds = duration_ns / 1e9
    ran = meter.num_cached >= 0
    num_prompt, items = int(meter.num_prompt[ran].sum()), num_encoder_hits + meter.num_encoded
    numbers: dict[str, float] = {}
    spreads = meter.ttft(), meter.inter_token(), meter.end_to_end()
    for name, spread in zip(LATENCIES, spreads, strict=True):
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
