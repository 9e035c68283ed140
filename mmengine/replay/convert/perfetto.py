"""Exports a log as a Chrome trace (JSON), which https://ui.perfetto.dev and chrome://tracing can show.

The trace has a single process, with a track for the steps, a track per row, asynchronous slices per request,
and counters. Times are in us since the log's first record. Format: "Trace Event Format", Google, 2016.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.timeline import fold, taken_tokens

QUEUED, PREFILL, DECODE, PREEMPTED = "QUEUED", "PREFILL", "DECODE", "PREEMPTED"
TraceEvent: TypeAlias = dict[str, object]
_PID, _STEPS, _FIRST_ROW = 1, 1, 2  # The process id, and two thread ids.


def perfetto_lines(folder: Path, findings: Findings | None = None) -> Iterator[str]:
    """Yield the trace line by line, without holding the whole trace in memory. `findings`: see CheckedLog.
    Raises the same errors as `mmengine.replay.verify`.
    """
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    log = CheckedLog(folder, findings=findings)
    trace = _Trace(0 if log.first is None else log.first.mono_ns)
    yield json.dumps(_meta("process_name", f"mmengine {log.started.engine_version}", 0))
    for event in trace.begins(log.first_state()):
        yield "," + json.dumps(event)
    for state, record in fold(log):
        with log.naming(record):
            for event in trace.of(state, record):
                yield "," + json.dumps(event)
    for event in trace.at_end():
        yield "," + json.dumps(event)
    yield "]}"


@dataclass(slots=True)
class _Life:
    """A live request: its phase, its row (-1: none), and the time when it got the row (ns)."""

    number: int
    phase: str
    row: int = -1
    row_since: int = 0
    resumed: int = 0  # Number of resumptions.


class _Trace:
    def __init__(self, began: int):
        self._began, self._last = began, began
        self._lives: dict[str, _Life] = {}
        self._num_requests = 0
        self._counters: dict[str, dict[str, int]] = {}
        # Maps each step in flight to its dispatch time and its counts.
        self._dispatched: dict[int, tuple[int, dict[str, int]]] = {}

    def of(self, state: State, record: Record) -> Iterator[TraceEvent]:
        """Yield the trace events for a record. `state`: the state before the record."""
        now, event = record.mono_ns, record.event
        self._last = now
        match event:
            case ev.Queued(request_id=name, prompt=prompt):
                args = {"prompt_tokens": len(prompt) // 4, "media": len(event.media), "step": record.step}
                yield from self._arrived(name, QUEUED, now, args)
            case ev.Admitted(request_id=name, row=row):
                yield from self._admitted(name, row, now)
            case ev.Preempted(request_id=name, reason=reason):
                yield from self._preempted(name, now, {"reason": reason, "mode": event.mode})
            case ev.Executed():
                yield from self._executed(state, record, event)
            case ev.Failed(error=error):
                yield from self._failed(now, error)
            case ev.Finished(request_id=name, reason=reason) if name in self._lives:
                yield from self._ended(name, now, {"finish_reason": reason, "detail": event.detail})
        if isinstance(event, (ev.Dispatched, ev.Executed, ev.Failed)) and state.is_open:
            yield from self._decided(state, record)

    def begins(self, state: State) -> Iterator[TraceEvent]:
        """Yield the names of the tracks, and the slices of requests that arrived before the log's first
        record.
        """
        yield _meta("thread_name", "steps", _STEPS)
        for row in range(min(state.config.num_rows, 4096)):
            yield _meta("thread_name", f"row {row}", _FIRST_ROW + row)
        for name, req_state in state.requests.items():
            phase = PREEMPTED if req_state.preempted else QUEUED
            if req_state.row >= 0:
                phase = DECODE if state.num_tokens[req_state.row] > req_state.num_prompt else PREFILL
            yield from self._arrived(name, phase, self._began, {"prompt_tokens": req_state.num_prompt})
            self._lives[name].row, self._lives[name].row_since = req_state.row, self._began

    def _arrived(self, name: str, phase: str, now: int, args: Mapping[str, object]) -> Iterator[TraceEvent]:
        self._num_requests += 1
        self._lives[name] = _Life(self._num_requests, phase)
        yield self._async(name, "b", name, now, args)
        yield self._async(name, "b", phase, now)

    def at_end(self) -> Iterator[TraceEvent]:
        """Yield the ends of the slices that are still open at the log's end."""
        for name in list(self._lives):
            yield from self._ended(name, self._last, {"finish_reason": "", "detail": "the log ends"})

    def _us(self, now: int) -> float:
        return (now - self._began) / 1000

    # Requests

    def _async(
        self, request: str, phase: str, name: str, now: int, args: Mapping[str, object] | None = None
    ) -> TraceEvent:
        number = self._lives[request].number
        head = {"ph": phase, "cat": "request", "id": number, "name": name, "pid": _PID, "tid": _STEPS}
        return {**head, "ts": self._us(now), "args": args or {}}

    def _turn(self, name: str, phase: str, now: int) -> Iterator[TraceEvent]:
        life = self._lives[name]
        yield self._async(name, "e", life.phase, now)
        life.phase = phase
        yield self._async(name, "b", phase, now)

    def _admitted(self, name: str, row: int, now: int) -> Iterator[TraceEvent]:
        life = self._lives[name]
        again = life.phase == PREEMPTED
        yield from self._turn(name, PREFILL, now)
        life.row, life.row_since = row, now
        if again:
            life.resumed += 1
            yield self._flow("f", life, now) | {"bp": "e"}

    def _flow(self, phase: str, life: _Life, now: int) -> TraceEvent:
        """Return a flow event: "s" at a preemption, or "f" at the row in which the request resumes."""
        number = life.number * 4096 + life.resumed % 4096
        head = {"ph": phase, "cat": "preemption", "name": "resume", "id": number}
        return {**head, "pid": _PID, "tid": _FIRST_ROW + life.row, "ts": self._us(now)}

    def _preempted(self, name: str, now: int, args: Mapping[str, object]) -> Iterator[TraceEvent]:
        life = self._lives[name]
        yield from self._leave_row(name, now, args)
        life.resumed += 1
        yield self._flow("s", life, max(life.row_since, now - 1))
        life.resumed -= 1
        life.row = -1
        yield from self._turn(name, PREEMPTED, now)

    def _leave_row(self, name: str, now: int, args: Mapping[str, object]) -> Iterator[TraceEvent]:
        life = self._lives[name]
        yield self._slice(name, _FIRST_ROW + life.row, life.row_since, now, {"request": life.number, **args})

    def _slice(self, name: str, tid: int, start: int, end: int, args: Mapping[str, object]) -> TraceEvent:
        span = {"ts": self._us(start), "dur": (end - start) / 1000}
        return {"ph": "X", "pid": _PID, "tid": tid, "name": name, **span, "args": args}

    def _ended(self, name: str, now: int, args: Mapping[str, object]) -> Iterator[TraceEvent]:
        life = self._lives[name]
        if life.row >= 0:
            yield from self._leave_row(name, now, args)
        yield self._async(name, "e", life.phase, now)
        yield self._async(name, "e", name, now, args)
        del self._lives[name]

    # Steps

    def _executed(self, state: State, record: Record, event: ev.Executed) -> Iterator[TraceEvent]:
        for row, _ in taken_tokens(state, event):
            name = state.requests_by_row[row].request.request_id
            if self._lives[name].phase == PREFILL:
                yield from self._turn(name, DECODE, record.mono_ns)
        if state.is_open and not state.flights:
            # The step has no DISPATCHED event, so `_decided` yields its slice.
            return
        yield from self._ran(record.step, record.mono_ns, event.device_ns)

    def _ran(self, step: int, now: int, device_ns: int) -> Iterator[TraceEvent]:
        since, facts = self._dispatched.pop(step, (now, {}))
        start = max(since, now - device_ns) if device_ns else since
        yield self._slice(f"step {step}", _STEPS, start, now, facts)

    def _failed(self, now: int, error: str) -> Iterator[TraceEvent]:
        head = {"ph": "i", "s": "p", "pid": _PID, "tid": _STEPS, "name": "step failed"}
        yield {**head, "ts": self._us(now), "args": {"error": error, "steps": sorted(self._dispatched)}}
        self._dispatched.clear()

    def _decided(self, state: State, record: Record) -> Iterator[TraceEvent]:
        """Yield the counters for the open step. If `record` contains the step's result, also yield the step's
        slice.
        """
        flight, now = state.open_step(), record.mono_ns
        facts = {"rows": len(flight.rows), "tokens": flight.num_tokens, "encoded": len(flight.encoded)}
        if isinstance(record.event, ev.Dispatched):
            self._dispatched[flight.step] = now, facts
        elif isinstance(record.event, ev.Executed) and not state.flights:
            self._dispatched[flight.step] = max(self._began, now - record.event.device_ns), facts
            yield from self._ran(flight.step, now, record.event.device_ns)
        blocks = state.blocks.num_blocks - 1 - state.blocks.num_free
        for name, values in (
            ("KV blocks", {"used": blocks}),
            ("encoder cache", {"used": state.encoder.used}),
            ("requests", {"running": len(state.running), "waiting": len(state.waiting)}),
        ):
            if self._counters.get(name) != values:
                self._counters[name] = values
                yield {"ph": "C", "pid": _PID, "name": name, "ts": self._us(now), "args": values}


def _meta(kind: str, name: str, tid: int) -> TraceEvent:
    return {"ph": "M", "pid": _PID, "tid": tid, "name": kind, "args": {"name": name}}
