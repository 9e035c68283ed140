"""Collects the data for a log's HTML report: columns with a value per step, and a lane per request. A lane is
a request's sequence of segments. A segment contains the request's state from a step on, with a reason if the
request waits. `chunks` lists the steps in which a running request does not compute exactly one token.
"""

import heapq
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.request_state import RequestState
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.queries.reasons import BEHIND, PREEMPTING, PREFILL_FIRST, ROWS, TOKENS, Reason, Reasons
from mmengine.replay.rerun.clock import SteadyClock
from mmengine.replay.timeline import is_scheduling

# A lane's states. PASSED_OVER: the request has a row, but was not scheduled in the step.
QUEUED, PREFILL, DECODE, PREEMPTED, SWAPPED, PASSED_OVER = range(6)
STATES = ("queued", "prefill", "decode", "preempted", "swapped", "running, not scheduled")
MAX_SEGMENTS = 8_000_000  # Maximum number of segments on a page. Later segments are left out.
# Reasons that apply to all waiting requests in a step. A step stores such a reason only once.
COMMON = frozenset((BEHIND, PREEMPTING, PREFILL_FIRST, ROWS, TOKENS))
# Maximum number of steps between two checks of the reasons.
REASONS_EVERY = 16

_BY_STEP = (
    *("time_ns", "device_ns", "tokens", "rows", "running", "waiting", "free_blocks"),
    *("encoder_used", "encoder_held", "encoded", "preempted", "admitted", "common_reason"),
    *("drafted", "kept"),
)


class Lanes:
    """The requests in arrival order, and their segments. Column `end`: the step in which a request ended, or
    -1.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.ends: list[str] = []  # The finish reason with its detail, or "" while the request is live.
        self.columns = {
            name: array("i")
            for name in ("start", "end", "prompt", "media", "embeds", "cached", "answer", "preemptions")
        }
        # The segments of all lanes, ordered by time. `lane`: the segment's lane.
        self.segments = {name: array("i") for name in ("lane", "step", "state", "reason", "needed")}
        self.by_id: dict[str, int] = {}
        self._last: list[tuple[int, int, int]] = []

    def arrive(self, name: str, num_prompt: int, media: tuple[int, int], step: int) -> int:
        """Add a request and return its lane. `media`: (number of media items, number of embeddings)."""
        lane = self.by_id[name] = len(self.ids)
        self.ids.append(name)
        self.ends.append("")
        values = (step, -1, num_prompt, *media, -1, 0, 0)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        self._last.append((-1, -1, -1))
        self.enter(lane, step, QUEUED)
        return lane

    def enter(self, lane: int, step: int, state: int, reason: int = 0, needed: int = 0) -> None:
        """Record that the lane is in this state from `step` on."""
        if self._last[lane] == (state, reason, needed) or len(self.segments["lane"]) >= MAX_SEGMENTS:
            return
        self._last[lane] = (state, reason, needed)
        for column, value in zip(
            self.segments.values(), (lane, step, state, reason, min(needed, 2**31 - 1)), strict=True
        ):
            column.append(value)

    def state_of(self, lane: int) -> int:
        return self._last[lane][0]

    def finish(self, event: ev.Finished, step: int, req_state: RequestState, num_tokens: int) -> None:
        lane = self.by_id.pop(event.request_id)
        self.columns["end"][lane] = step
        self.columns["answer"][lane] = num_tokens - req_state.num_prompt
        self.ends[lane] = f"{event.reason}: {event.detail}" if event.detail else event.reason


class Collector:
    """Reads a log, and collects the data for its report. `reasons`: all reasons that occur. Segments and
    steps contain an index into `reasons`, from 1 on. Index 0 in a waiting segment stands for the step's
    common reason. `state`: the initial state (default: the log's first state).
    """

    def __init__(self, log: CheckedLog, state: State | None = None):
        self.log = log
        self.state = log.first_state() if state is None else state
        self._view = View(self.state)
        self.lanes = Lanes()
        self.steps = {name: array("q") for name in _BY_STEP}
        self.chunks: list[np.ndarray] = []  # int32 [n, 3]: step, lane, tokens.
        self.reasons = [""]
        self.notes: list[tuple[int, str]] = []  # Events that concern the whole engine.
        self.first_step = -1
        self.failed: list[int] = []
        self._lane_of_row = np.full(log.config.num_rows, -1, np.int32)
        self._phase = np.full(log.config.num_rows, -1, np.int8)
        self._why: Reasons | None = None
        self._stale = True  # Whether reasons may have changed since the last check.
        self._admitted = self._preempted = 0
        self._common = 0  # Index into `reasons`.
        self._in_flight = [-1] * len(
            self.state.flights
        )  # Indices into `steps`; -1: decided before the log begins.
        self._clock, self._now = SteadyClock(), 0
        for req_state in self.state.requests.values():  # Not empty if the log's beginning was deleted.
            self._present(req_state)

    def read(self, progress: Callable[[Record], None]) -> None:
        for record in self.log:
            self.take(record)
            progress(record)
        self.count_answers()

    def take(self, record: Record) -> None:
        """Process the next record."""
        with self.log.naming(record):
            self.log.check(self.state, record.event)
            self._before(record)
            evolve(self.state, record.event)
            self._after(record)

    def count_answers(self) -> None:
        """Store the number of answer tokens that each unfinished request has so far."""
        for name, lane in self.lanes.by_id.items():
            req_state = self.state.requests[name]
            count = len(req_state.tokens) if req_state.row < 0 else int(self.state.num_tokens[req_state.row])
            self.lanes.columns["answer"][lane] = count - req_state.num_prompt

    @property
    def num_done(self) -> int:
        """The number of steps before the first step in flight. The data for these steps is final."""
        flying = [place for place in self._in_flight if place >= 0]
        return min(flying, default=len(self.steps["rows"]))

    def _present(self, req_state: RequestState) -> None:
        """Add a request that arrived before the log's first record."""
        request, step = req_state.request, self.state.step
        media = (len(request.media), sum(item.num_embeds for item in request.media))
        lane = self.lanes.arrive(request.request_id, req_state.num_prompt, media, step)
        self.lanes.columns["cached"][lane] = req_state.num_cached
        if req_state.row >= 0:
            self._lane_of_row[req_state.row] = lane
        elif len(req_state.tokens) > req_state.num_prompt or req_state.preempted:
            self.lanes.enter(lane, step, SWAPPED if req_state.num_swapped else PREEMPTED)

    # Before a record is applied

    def _before(self, record: Record) -> None:
        state, event, self._now = self.state, record.event, self._clock.of(record)
        if is_scheduling(state, event):
            self._ask(event)
        match event:
            case ev.Dispatched() | ev.Executed() | ev.Failed() | ev.Recovered() if state.is_open:
                self._close_step()
        match event:
            case ev.Recovered():
                self._lose_flights()
                self.notes.append((record.step, "the process ended, and another process continued"))
            case ev.Executed(device_ns=device_ns, counts=counts):
                if (place := self._in_flight.pop(0)) >= 0:
                    self.steps["device_ns"][place] = device_ns
                    self.steps["kept"][place] = _num_kept(counts)
            case ev.Failed(error=error):
                self._lose_flights()
                self.notes.append((record.step, f"the step failed: {error}"))
            case ev.Stalled(kind=kind, detail=detail):
                self.notes.append((record.step, f"{kind}: {detail}"))
            case ev.CacheReset():
                self.notes.append((record.step, "the prefix cache was reset"))
            case ev.Finished(request_id=name) if name in state.requests:
                req_state = state.requests[name]
                count = len(req_state.tokens) if req_state.row < 0 else int(state.num_tokens[req_state.row])
                self.lanes.finish(event, state.step, req_state, count)
                self._stale = True
            case ev.Preempted():
                self._preempted += is_scheduling(state, event)

    def _lose_flights(self) -> None:
        self.failed += [place for place in self._in_flight if place >= 0]
        self._in_flight.clear()

    def _ask(self, event: ev.Event) -> None:
        """Record why requests wait in the open step. If nothing has changed, keep the previous reasons."""
        state = self.state
        same = isinstance(event, ev.Scheduled) and event.rows is None and not event.encode
        everyone = len(state.running) == len(state.last_rows)
        if same and everyone and not (state.waiting and (self._stale or state.step % REASONS_EVERY == 0)):
            return
        self._why = self._why or Reasons(self._view)
        self._why.before(event)

    def _close_step(self) -> None:
        """Record the open step's batch, and the requests that are not in the batch."""
        state = self.state
        if self.first_step < 0:
            self.first_step = state.step
        self._in_flight.append(len(self.steps["rows"]))
        rows = state.step_rows
        encoded = sum(request.media[index].num_embeds for _, request, index in state.step_encoded)
        values = (
            *(self._now, 0, state.config.token_budget - state.tokens_left, len(rows)),
            *(len(state.running), len(state.waiting), state.blocks.num_free, state.encoder.used),
            *(state.encoder.used - state.encoder.idle_size, encoded, self._preempted, self._admitted, 0),
            *(int(state.scheduled_drafts[rows].sum()), 0),
        )
        for column, value in zip(self.steps.values(), values, strict=True):
            column.append(value)
        self._admitted = self._preempted = 0
        self._place(rows)
        if self._why is not None:
            for reason in self._why.at_end():
                self._wait(reason)
            self._why, self._stale = None, False
        self.steps["common_reason"][-1] = self._common

    def _place(self, rows: np.ndarray) -> None:
        """Add a segment for each row whose state changed. Add a chunk for each row that does not compute
        exactly one token.
        """
        state = self.state
        scheduled = state.scheduled[rows]
        before = state.num_computed[rows] - scheduled
        behind = state.num_tokens[rows] + state.num_pending[rows] - before
        phase = np.where(behind > 1, PREFILL, DECODE).astype(np.int8)
        for place in (phase != self._phase[rows]).nonzero()[0].tolist():
            self.lanes.enter(int(self._lane_of_row[rows[place]]), state.step, int(phase[place]))
        self._phase[rows] = phase
        other = (scheduled != 1).nonzero()[0]
        if len(other):
            numbers = np.full(len(other), state.step)
            self.chunks.append(
                np.stack((numbers, self._lane_of_row[rows[other]], scheduled[other]), axis=1).astype(np.int32)
            )

    def _wait(self, reason: Reason) -> None:
        req_state = self.state.requests[reason.request_id]
        lane = self.lanes.by_id[reason.request_id]
        if req_state.row >= 0:
            self._phase[req_state.row] = PASSED_OVER
        state = PASSED_OVER if req_state.row >= 0 else self.lanes.state_of(lane)
        if reason.kind in COMMON:
            self._common = self._number_of(reason.kind)
            self.lanes.enter(lane, self.state.step, state)
        else:
            self.lanes.enter(lane, self.state.step, state, self._number_of(reason.kind), reason.needed)

    def _number_of(self, kind: str) -> int:
        if kind not in self.reasons:
            self.reasons.append(kind)
        return self.reasons.index(kind)

    # After a record is applied

    def _after(self, record: Record) -> None:
        state, event = self.state, record.event
        match event:
            case ev.Queued():
                media = (len(event.media), sum(item.num_embeds for item in event.media))
                self.lanes.arrive(event.request_id, len(event.prompt) // 4, media, state.step)
                self._stale = True
            case ev.Admitted(request_id=name, row=row):
                lane = self._lane_of_row[row] = self.lanes.by_id[name]
                self._phase[row] = -1
                self._admitted += 1
                self._stale = True
                if self.lanes.columns["cached"][lane] < 0:
                    self.lanes.columns["cached"][lane] = state.requests[name].num_cached
            case ev.Preempted(request_id=name, mode=mode):
                lane = self.lanes.by_id[name]
                self.lanes.columns["preemptions"][lane] += 1
                self.lanes.enter(lane, state.step, SWAPPED if mode == "swap" else PREEMPTED)
                self._stale = True
            case ev.GrammarReady() | ev.GrammarFailed() | ev.Cancelled() | ev.Offered() | ev.Lost():
                self._stale = True


def _num_kept(counts: bytes | None) -> int:
    """Return the number of drafts that a step accepted. A row's new tokens are accepted drafts, except for
    the last token.
    """
    if counts is None:
        return 0
    gained = np.frombuffer(counts, np.int32)
    return int(gained.sum()) - int((gained > 0).sum())


def slots_of(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return each lane's line number in the drawing (int32): the first free line at the lane's start.
    `start`, `end`: each lane's first step, and the step at which its line becomes free. The lanes are ordered
    by start.
    """
    slots = np.zeros(len(start), np.int32)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # Pairs of the step at which a line becomes free, and the line.
    for lane, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else len(busy)
        slots[lane] = slot
        heapq.heappush(busy, (max(last, first + 1), slot))
    return slots


def collect(
    folder: Path,
    progress: Callable[[Record], None] = lambda record: None,
    findings: Findings | None = None,
) -> Collector:
    """Return all data for a log's report. `findings`: see CheckedLog. Raises the same errors as
    mmengine.replay.verify.
    """
    collector = Collector(CheckedLog(folder, findings=findings))
    collector.read(progress)
    return collector
