"""Extracts a log's requests and answers, without the scheduling, so that the requests can be run again.

A script consists of observations and answers. The observations are the arrivals, grammars, cancels and resets
in the log, with the step and the time at which the scheduler saw them. An answer contains a request's tokens,
and the stop or error that ended the answer. A rerun may change settings or omit requests. The remaining
requests keep their answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.fold import sessions
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.columns import BROKEN
from mmengine.core.state.request_state import RequestState, queued_of
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.rerun.clock import SteadyClock
from mmengine.replay.timeline import is_scheduling


@dataclass(slots=True)
class Answer:
    """A request's answer.

    `tokens`: int32. `stop`: the stop that ended the answer, such as "eos", or "". `error`: the error that
    ended the answer, or "". If both are "", the answer ended by length or by a cancel. `runs` (int32 [n, 3]):
    a row for each step, if the log's settings allow drafts. The columns are the step's first output index,
    its number of tokens, and its number of drafts.
    """

    tokens: np.ndarray
    stop: str = ""
    error: str = ""
    runs: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))


Observed = (
    ev.Queued
    | ev.GrammarReady
    | ev.GrammarFailed
    | ev.Cancelled
    | ev.CacheReset
    | ev.Recovered
    | ev.SessionOpened
    | ev.Appended
    | ev.SessionClosed
)


@dataclass(frozen=True, slots=True)
class Observation:
    """An event that the scheduler observed.

    `step`: the number that the next step had when the scheduler saw the event. `landed`: the number of steps
    whose results had returned at this time. `time_ns`: the time since the log's first record. The event
    occurred at most `slack_ns` earlier, because the scheduler looks for new events once per step.
    """

    step: int
    landed: int
    time_ns: int
    event: Observed
    slack_ns: int = 0


@dataclass(slots=True)
class Script:
    """A log's requests and answers, without the scheduling.

    `unfinished`: the ids of requests without an end in the log. `failed_steps`: maps a failed step to its
    error message. `num_rejected`: the number of requests that were rejected because the queue was full. The
    log does not contain their prompts, so they cannot be run again.
    """

    config: EngineConfig
    observations: list[Observation] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    failed_steps: dict[int, str] = field(default_factory=dict)
    num_rejected: int = 0
    num_steps: int = 0  # Number of steps in the log.

    @property
    def requests(self) -> list[ev.Queued]:
        """The requests, in arrival order."""
        return [each.event for each in self.observations if isinstance(each.event, ev.Queued)]


Watch = Callable[[State, Record], None]


def read_script(
    folder: Path, watch: Watch = lambda state, record: None, findings: Findings | None = None
) -> Script:
    """Return a log's script. `findings`: see CheckedLog.

    `watch` is called with each record, and the state before the record. A repeated id gets a number ("a",
    then "a#2"), so that ids are unique in a script. Raises the same errors as `verify` (replay/verify.py).
    """
    log = CheckedLog(folder, findings=findings)
    state = log.first_state()
    reader = _Reader(Script(log.config))
    for req_state in state.requests.values():  # Not empty if the log's beginning was deleted.
        reader.present(state, req_state)
    for record in log:
        with log.naming(record):
            log.check(state, record.event)
            watch(state, record)
            reader.read(state, record)
            evolve(state, record.event)
    reader.script.num_steps = state.step
    for name in state.requests:
        reader.script.unfinished.append(reader.answer(state, name))
    return reader.script


class _Reader:
    def __init__(self, script: Script):
        self.script = script
        self._clock, self._now = SteadyClock(), 0
        self._looked_ns = 0  # When the scheduler last looked for new events.
        self._runs: dict[str, list[tuple[int, int, int]]] = {}
        self._times: dict[str, int] = {}  # Maps an id to the number of arrivals with this id.
        # Maps an id in the log to the script's id for the last request with this id.
        self._name_of: dict[str, str] = {}
        self._sessions: set[str] = set()  # Sessions that were opened since the log's first record.

    def present(self, state: State, req_state: RequestState) -> None:
        """Add a request that arrived before the log's first record."""
        request = req_state.request
        event = queued_of(request)
        self._name_of[request.request_id], self._times[request.request_id] = request.request_id, 1
        self._observe(state, event)

    def read(self, state: State, record: Record) -> None:
        event, self._now = record.event, self._clock.of(record)
        if not state.requests or is_scheduling(state, event):
            self._looked_ns = self._now
        match event:
            case ev.Queued(request_id=name):
                self._times[name] = self._times.get(name, 0) + 1
                unique = self._name_of[name] = self._unique(name, self._times[name])
                group = self._name_of.get(event.group, "")
                event = state.grammar_slots.whole(event)
                session = state.sessions.of_request.get(name)
                if session is not None and session.session_id not in self._sessions:
                    event = sessions.with_session_prefix(state, event)
                self._observe(state, msgspec.structs.replace(event, request_id=unique, group=group))
            case ev.GrammarReady(request_id=name) | ev.GrammarFailed(request_id=name):
                self._observe(state, msgspec.structs.replace(event, request_id=self._name_of[name]))
            case ev.Cancelled(request_id=name):
                self._observe(state, msgspec.structs.replace(event, request_id=self._name_of[name]))
            case ev.CacheReset():
                self._observe(state, event)
            case ev.SessionOpened(session_id=session_id):
                self._sessions.add(session_id)
                self._observe(state, event)
            case ev.Appended(session_id=session_id, request_id=name) if session_id in self._sessions:
                unique = self._unique(name, self._times.get(name, 0) + 1)
                self._observe(state, msgspec.structs.replace(event, request_id=unique))
            case ev.SessionClosed(session_id=session_id) if session_id in self._sessions:
                self._observe(state, event)
            case ev.Recovered(lost=lost):
                lost = tuple((self._name_of[name], why) for name, why in lost)
                self._observe(state, ev.Recovered(mode=event.mode, lost=lost))
            case ev.Executed(counts=counts) if state.config.num_draft_tokens:
                rows = state.sampled_rows()
                ones = np.ones(len(rows), np.int32)
                self._note_runs(state, rows, ones if counts is None else np.frombuffer(counts, np.int32))
            case ev.Failed(error=error):
                self.script.failed_steps[record.step] = error
            case ev.Finished(request_id=name) if name in state.requests:
                self.answer(state, name, event)
            case ev.Finished():
                self.script.num_rejected += 1

    @staticmethod
    def _unique(name: str, number: int) -> str:
        return name if number == 1 else f"{name}#{number}"

    def _observe(self, state: State, event: Observed) -> None:
        landed = state.step - len(state.flights)
        slack_ns = self._now - self._looked_ns
        self.script.observations.append(Observation(state.step, landed, self._now, event, slack_ns))

    def _note_runs(self, state: State, rows: np.ndarray, counts: np.ndarray) -> None:
        drafts, req_state = state.scheduled_drafts[rows], state.num_tokens[rows]
        for row, *run in zip(*(each.tolist() for each in (rows, req_state, counts, drafts)), strict=True):
            request = state.requests_by_row[row]
            if request is not None:
                run[0] -= request.num_prompt
                self._runs.setdefault(request.request.request_id, []).append(tuple(run))

    def answer(self, state: State, name: str, end: ev.Finished | None = None) -> str:
        """Store a request's answer, and return the id of the request in the script. `end`: the request's end,
        or None if the log ends first.
        """
        req_state = state.requests[name]
        broke = req_state.row >= 0 and bool(state.ended[req_state.row] == BROKEN)
        answer = Answer(state.known_tokens(req_state)[req_state.num_prompt :].copy())
        if end is None and req_state.row >= 0 and state.config.num_draft_tokens:
            # The log ends before the proposed drafts are verified.
            row = req_state.row
            drafts = int(max(state.scheduled_drafts[row], state.num_drafts[row]))
            place = int(state.num_tokens[row]) - req_state.num_prompt
            self._runs.setdefault(name, []).append((place, 1, drafts))
        if runs := self._runs.pop(name, None):
            answer.runs = np.array(runs, np.int32)
        if end is not None and end.reason == "stop":
            answer.stop = end.detail or "eos"
        elif end is not None and broke:
            answer.error = end.detail or "error"
        self.script.answers[self._name_of[name]] = answer
        return self._name_of[name]
