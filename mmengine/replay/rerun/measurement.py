"""Measures the times in a log: the latencies of requests and the durations of steps."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.rerun.clock import SteadyClock
from mmengine.replay.rerun.fit import work_of
from mmengine.simulation.device import share_of
from mmengine.simulation.meter import Meter

MAX_REQUESTS = 2**22
MAX_STEP_NS = 10**15  # Eleven days.


@dataclass(slots=True)
class Measured:
    """Measurements from a log.

    `work` [n, p]: the amounts of each step (see fit.PARTS). `device_ns`: the duration of each step on the
    device. `host_rows` and `host_ns` concern steps that began right after another step: the number of rows,
    and the time for which the device was idle between the two steps. `meter`: the requests, with times since
    the log's first arrival.
    """

    meter: Meter
    duration_ns: int = 0
    num_steps: int = 0
    num_encoder_hits: int = 0
    work: list[np.ndarray] = field(default_factory=list)
    device_ns: list[int] = field(default_factory=list)
    host_rows: list[int] = field(default_factory=list)
    host_ns: list[int] = field(default_factory=list)
    num_accepted: int = 0  # Number of accepted drafts.
    num_refused: int = 0  # Number of rows with a rejected draft.


class Watch:
    """Measures a log. The caller passes each record, with the state before it, to `see`. `measured` is valid
    after the last record.
    """

    def __init__(self, config: EngineConfig, num_requests: int):
        self.measured = Measured(Meter(num_requests, config.max_num_seqs))
        self._clock = SteadyClock()
        self._names: dict[str, str] = {}
        self._has_begun = False
        self._count = 0
        self._start_ns = -1
        # For each decided step: the amounts (None if unknown), and the number of rows.
        self._decided: deque[tuple[np.ndarray | None, int]] = deque()
        # The time at which the last step returned, or -1 if the engine was idle since then.
        self._last_ns = -1
        self._admitted: tuple[str, int] | None = None
        self._overlaps = config.max_in_flight > 1

    def see(self, state: State, record: Record) -> None:
        measured, event, time_ns = self.measured, record.event, self._clock.of(record)
        if not self._has_begun:
            self._begin(state)
        if self._admitted is not None:
            name, num_encoded = self._admitted
            measured.num_encoder_hits += len(state.requests[name].held_media) - num_encoded
            self._admitted = None
        if not state.requests:
            self._last_ns = -1
        now = time_ns - self._start_ns
        if isinstance(event, (ev.Dispatched, ev.Executed, ev.Failed)) and state.is_open:
            self._decide(state, time_ns)
        match event:
            case ev.Queued(request_id=name):
                if self._start_ns < 0:
                    self._start_ns, now = time_ns, 0
                unique = self._names[name] = str(self._count)
                self._count += 1
                measured.meter.arrived(unique, len(event.prompt) // 4, now)
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
                self._last_ns = -1
            case ev.Finished(request_id=name) if name in state.requests:
                measured.meter.finished(self._names[name], event.reason, now)

    def _begin(self, state: State) -> None:
        """Add the requests that arrived before the log's first record. Their times are measured from this
        record.
        """
        self._has_begun = True
        self._decided.extend([(None, 0)] * len(state.flights))
        for name, req_state in state.requests.items():
            self._start_ns = 0
            self._names[name] = str(self._count)
            self.measured.meter.arrived(self._names[name], req_state.num_prompt, 0)
            self._count += 1
            if req_state.row >= 0:
                self.measured.meter.admitted(self._names[name], req_state.row, max(0, req_state.num_cached))

    def _decide(self, state: State, time_ns: int) -> None:
        rows = state.step_rows
        scheduled = state.scheduled[rows]
        embeds = sum(request.media[index].num_embeds for _, request, index in state.step_encoded)
        if (part := state.step_part) is not None:
            owner = state.requests[part.request_id]
            size = owner.request.media[part.item].num_embeds
            embeds += share_of(size, part.start, part.until, owner.media_work[part.item])
        work = work_of(scheduled, state.num_computed[rows] - scheduled, embeds)
        self._decided.append((work, len(rows)))
        if self._overlaps and self._last_ns >= 0:
            self.measured.host_rows.append(len(rows))
            self.measured.host_ns.append(time_ns - self._last_ns)

    def _land(self, state: State, event: ev.Executed, time_ns: int) -> None:
        measured, now = self.measured, time_ns - self._start_ns
        if event.device_ns > MAX_STEP_NS:
            raise ValueError(f"a step took {event.device_ns} ns; the limit is {MAX_STEP_NS}")
        work, num_rows = self._decided.popleft()
        measured.num_steps += 1
        measured.duration_ns = now
        if event.device_ns > 0 and work is not None and num_rows:
            measured.work.append(work)
            measured.device_ns.append(event.device_ns)
            if not self._overlaps and self._last_ns >= 0:
                measured.host_rows.append(num_rows)
                measured.host_ns.append(max(0, time_ns - self._last_ns - event.device_ns))
        self._last_ns = time_ns
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
