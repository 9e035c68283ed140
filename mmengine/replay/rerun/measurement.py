"""Measures the times in a log: the latencies of requests and the durations of steps."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.rerun.clock import SteadyClock
from mmengine.replay.rerun.fit import StepWork, work_of
from mmengine.replay.rerun.resampling import DrawnTimes
from mmengine.replay.rerun.step_times import DURING, PLAIN, TimedStep
from mmengine.replay.timeline import is_scheduling
from mmengine.simulation.device import share_of
from mmengine.simulation.meter import Meter

MAX_REQUESTS = 2**22
MAX_STEP_NS = 10**15  # Maximum duration of a step: eleven days.


@dataclass(slots=True)
class Measured:
    """Measurements from a log. `steps`: the steps that have rows and a known duration. `meter`: the requests,
    with times since the log's first arrival.
    """

    meter: Meter
    duration_ns: int = 0
    num_steps: int = 0
    num_encoder_hits: int = 0
    steps: list[TimedStep] = field(default_factory=list)
    num_accepted: int = 0  # Number of accepted drafts.
    num_refused: int = 0  # Number of rows with a rejected draft.


class Watch:
    """Measures a log. The caller passes each record to `see`, with the state before the record. `measured` is
    valid after the last record.
    """

    def __init__(self, config: EngineConfig, num_requests: int):
        self.measured = Measured(Meter(num_requests, config.num_rows))
        self._clock = SteadyClock()
        self._names: dict[str, str] = {}
        self._has_begun = False
        self._count = 0
        self._start_ns = -1
        # For each decided step: its work (None if unknown), and the host time before the step in ns (-1 if
        # unknown).
        self._decided: deque[tuple[StepWork | None, int]] = deque()
        # The time at which the last result returned, or -1 if the engine has been idle since then.
        self._last_ns = -1
        self._first_ns = -1  # The time of the first decision for the step that is not dispatched yet.
        self._admitted: tuple[str, int] | None = None
        self._overlaps = config.max_in_flight > 1

    def see(self, state: State, record: Record) -> None:
        measured, event = self.measured, record.event
        if not self._has_begun:
            self._begin(state)
        if self._admitted is not None:
            name, num_encoded = self._admitted
            measured.num_encoder_hits += len(state.requests[name].held_media) - num_encoded
            self._admitted = None
        if not len(state.running) and all(each.waits_for_grammar for each in state.requests.values()):
            self._last_ns = -1  # The engine had nothing to run.
        if isinstance(event, (ev.Dispatched, ev.Executed, ev.Failed)) and state.is_open:
            self._decided.append((_work(state), -1))
        time_ns = self._time(state, record)
        now = time_ns - self._start_ns
        if isinstance(event, ev.Dispatched) and self._decided and self._last_ns >= 0:
            self._decided[-1] = self._decided[-1][0], time_ns - self._last_ns
        if self._first_ns < 0 and is_scheduling(state, event):
            self._first_ns = time_ns
        match event:
            case ev.Queued(request_id=name):
                if self._start_ns < 0:
                    self._start_ns, now = time_ns, 0
                unique = self._names[name] = str(self._count)
                self._count += 1
                measured.meter.arrived(unique, len(event.prompt) // 4, now)
                if self._last_ns >= 0 and measured.steps:
                    measured.steps[-1] = replace(measured.steps[-1], has_arrival=True)
            case ev.Scheduled(encode=encode):
                measured.meter.num_encoded += len(encode)
            case ev.Admitted(request_id=name, encode=encode):
                hits = hit_tokens(state, event)
                computed = hits if event.num_computed < 0 else event.num_computed
                measured.meter.admitted(self._names[name], event.row, computed)
                measured.meter.num_encoded += len(encode)
                self._admitted = name, len(encode)
            case ev.Encoded(request_id=name, index=index, until=until):
                measured.meter.num_encoded += until >= state.requests[name].media_work[index]
            case ev.Preempted():
                measured.meter.preempted()
            case ev.Executed():
                self._land(state, event, time_ns)
            case ev.Failed() | ev.Recovered():
                self._decided.clear()
                self._last_ns = self._first_ns = -1
            case ev.Finished(request_id=name) if name in state.requests:
                measured.meter.finished(self._names[name], event.reason, now)

    def _time(self, state: State, record: Record) -> int:
        """Return the record's time in ns since the log's first record."""
        return self._clock.of(record)

    def _begin(self, state: State) -> None:
        """Add the requests that arrived before the log's first record. Their times are measured from this
        record.
        """
        self._has_begun = True
        self._decided.extend([(None, -1)] * len(state.flights))
        for name, req_state in state.requests.items():
            self._start_ns = 0
            self._names[name] = str(self._count)
            self.measured.meter.arrived(self._names[name], req_state.num_prompt, 0)
            self._count += 1
            if req_state.row >= 0:
                self.measured.meter.admitted(self._names[name], req_state.row, max(0, req_state.num_cached))

    def _land(self, state: State, event: ev.Executed, time_ns: int) -> None:
        measured, now = self.measured, time_ns - self._start_ns
        if event.device_ns > MAX_STEP_NS:
            raise ValueError(f"a step took {event.device_ns} ns; the limit is {MAX_STEP_NS}")
        work, host_ns = self._decided.popleft()
        measured.num_steps += 1
        measured.duration_ns = now
        if event.device_ns > 0 and work is not None and work.num_rows:
            begin, pause_ns = self._last_ns if self._last_ns >= 0 else self._first_ns, 0
            if not self._overlaps and begin >= 0:
                host_ns = max(0, time_ns - begin - event.device_ns)
                if event.host_ns:  # The process ran only for this time. The rest is a pause.
                    pause_ns = max(0, host_ns - event.host_ns)
                    host_ns -= pause_ns
            is_first = self._last_ns < 0
            measured.steps.append(TimedStep(work, event.device_ns, host_ns, now, pause_ns, is_first))
        self._last_ns, self._first_ns = time_ns, -1
        rows = state.sampled_rows()
        counts = None if event.counts is None else np.frombuffer(event.counts, np.int32)
        whole = np.ones(len(rows), bool)
        whole[[index for index, _ in event.errors]] = False
        if counts is not None:
            drafts = state.scheduled_drafts[rows]
            measured.num_accepted += int((counts - 1).sum())
            measured.num_refused += int((counts - 1 < drafts).sum())
            room = state.max_total[rows] - state.num_tokens[rows]
            counts = np.minimum(counts, room)[whole]
        measured.meter.sampled(rows[whole], counts, now)


def _work(state: State) -> StepWork:
    """Return the work in the step that is decided but not dispatched yet."""
    rows = state.step_rows
    scheduled = state.scheduled[rows]
    embeds = sum(request.media[index].num_embeds for _, request, index in state.step_encoded)
    if (part := state.step_part) is not None:
        owner = state.requests[part.request_id]
        size = owner.request.media[part.item].num_embeds
        embeds += share_of(size, part.start, part.until, owner.media_work[part.item])
    computed, drafts = state.num_computed[rows] - scheduled, state.scheduled_drafts[rows]
    return work_of(scheduled, computed, drafts, state.due(), embeds)


class PricedWatch(Watch):
    """Measures a log with computed step times instead of the logged times. Decisions, record order and idle
    times stay as logged. `times` computes each step's duration from the step's work. `steps`: the log's
    steps, as a Watch measured them.
    """

    def __init__(self, config: EngineConfig, num_requests: int, times: DrawnTimes, steps: list[TimedStep]):
        super().__init__(config, num_requests)
        self._times, self._steps = times, steps
        self._now = self._logged_ns = 0

    def _time(self, state: State, record: Record) -> int:
        logged_ns, before = self._clock.of(record), self._logged_ns
        self._logged_ns = logged_ns
        work = self._decided[0][0] if self._decided else None
        if not isinstance(record.event, ev.Executed) or work is None or not work.num_rows:
            self._now += logged_ns - before
            return self._now
        begin = self._last_ns if self._last_ns >= 0 else self._first_ns
        if self._last_ns < 0:
            self._times.begin()
        number = len(self.measured.steps)
        is_delayed = number < len(self._steps) and self._steps[number].has_arrival
        time_ns = self._times.step_ns(work, begin - self._start_ns)
        delay_ns = self._times.delay_ns(DURING if is_delayed else PLAIN)
        self._times.prolong(delay_ns)
        time_ns += delay_ns
        self._now = max(self._now, begin + time_ns)
        return self._now
