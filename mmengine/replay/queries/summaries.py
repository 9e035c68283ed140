"""Summarizes a log as tables, with a line per request or per step. The decisions come from the log and are
not derived again.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmengine.core.fold import sessions
from mmengine.core.state.blocks import hit_tokens
from mmengine.core.state.draft_counts import count_drafts
from mmengine.core.state.flight import Flight
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings
from mmengine.replay.queries.envelopes import api_name, client_ids
from mmengine.replay.queries.wall_clock import WallClock
from mmengine.replay.timeline import fold, taken_tokens


@dataclass(slots=True)
class RequestLine:
    """A request's summary. Most times are in ns since the request's arrival, or -1 if the event did not
    happen. `queued_ns` is the arrival on the log's clock, and `wall_ns` is the arrival's Unix time, or 0 if
    unknown. `admitted_ns` is the time of the first admission.
    """

    request_id: str
    num_prompt_tokens: int
    num_media: int
    queued_ns: int
    queued_step: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    first_token_ns: int = -1
    end_ns: int = -1
    end_step: int = -1
    finish_reason: str = ""
    detail: str = ""
    api: str = ""  # The name of the API that was called, from the envelope.
    num_given_tokens: int = 0  # Answer tokens that another engine computed before the request arrived.
    admitted_ns: int = -1
    wall_ns: int = 0
    client_ids: tuple[str, ...] = ()  # The ids by which a client knows the request, from the envelope.


@dataclass(slots=True)
class StepLine:
    """A step's summary: its batch, and the resources that are free after its decisions."""

    step: int
    num_rows: int
    num_tokens: int
    num_admitted: int
    num_encoded: int
    num_preempted: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    encoder_used: int
    device_ms: float = 0.0
    failed: str = ""


class _Requests:
    """The summaries of unfinished requests. Each record updates them. `state` arguments are the state before
    the record.
    """

    def __init__(self, clock: WallClock | None = None) -> None:
        self._live: dict[str, RequestLine] = {}  # An id may be reused after its request has ended.
        self._clock = clock

    def carried_over(self, log: CheckedLog) -> list[RequestLine]:
        """Return lines for the requests that arrived before the log's first record. Their times are measured
        from this record.
        """
        state, first = log.first_state(), log.first
        if first is None:
            return []
        for name, req_state in state.requests.items():
            row, queued = req_state.row, req_state.request
            tokens = len(req_state.tokens) if row < 0 else int(state.num_tokens[row])
            line = RequestLine(name, req_state.num_prompt, len(queued.media), first.mono_ns, first.step)
            line.num_output_tokens = tokens - req_state.num_prompt
            line.num_cached_tokens, line.api = max(0, req_state.num_cached), api_name(queued.envelope)
            line.client_ids = client_ids(name, queued.envelope)
            self._live[name] = line
        return list(self._live.values())

    def queued(self, state: State, record: Record) -> RequestLine | None:
        """Return a new line if the record is a request's arrival, otherwise None."""
        match record.event:
            case ev.Queued(request_id=name, prompt=prompt, media=media, outputs=outputs, envelope=envelope):
                if name in state.sessions.of_request:
                    whole = sessions.with_session_prefix(state, record.event)
                    prompt, media = whole.prompt, whole.media
                line = RequestLine(name, len(prompt) // 4, len(media), record.mono_ns, record.step)
                line.num_output_tokens = line.num_given_tokens = len(outputs) // 4
                line.api, line.client_ids = api_name(envelope), client_ids(name, envelope)
                line.wall_ns = 0 if self._clock is None else self._clock.at(record)
                self._live[name] = line
                return line
        return None

    def ended(self, state: State, record: Record) -> RequestLine | None:
        """Update the lines with the record. Return the line of a request that ends with the record, or
        None.
        """
        event = record.event
        match event:
            case ev.Admitted(request_id=name) if self._live[name].num_preemptions == 0:
                line = self._live[name]
                line.num_cached_tokens = hit_tokens(state, event)
                line.admitted_ns = record.mono_ns - line.queued_ns
            case ev.Preempted(request_id=name):
                self._live[name].num_preemptions += 1
            case ev.Executed():
                self._count_drafts(state, event)
                for row, tokens in taken_tokens(state, event):
                    line = self._live[state.requests_by_row[row].request.request_id]
                    line.num_output_tokens += len(tokens)
                    if line.first_token_ns < 0:
                        line.first_token_ns = record.mono_ns - line.queued_ns
            case ev.Finished(request_id=name) if name in state.requests:
                line = self._live.pop(name)
                line.finish_reason, line.detail = event.reason, event.detail
                line.end_ns, line.end_step = record.mono_ns - line.queued_ns, record.step
                return line
        return None

    def _count_drafts(self, state: State, event: ev.Executed) -> None:
        sampled = state.sampled_rows()
        found = count_drafts(state, sampled, event)
        if found is None:
            return
        for row, proposed, accepted in zip(sampled[found.places].tolist(), *found[2:], strict=True):
            req_state = state.requests_by_row[row]
            if req_state is not None:
                line = self._live[req_state.request.request_id]
                line.num_drafts += int(proposed)
                line.num_accepted += int(accepted)


def request_lines(folder: Path, findings: Findings | None = None) -> list[RequestLine]:
    """Return a line for every request in a log, in arrival order. `findings`: see CheckedLog. Raises LogError
    if the log is missing or damaged.
    """
    log = CheckedLog(folder, findings=findings)
    requests = _Requests(WallClock(folder))
    lines = requests.carried_over(log)
    with log.naming():
        for state, record in fold(log):
            if (line := requests.queued(state, record)) is not None:
                lines.append(line)
            requests.ended(state, record)
    return lines


def ended_requests(log: CheckedLog) -> Iterator[RequestLine]:
    """Yield a line for each request that ends in the log, in the order of their ends."""
    requests = _Requests()
    requests.carried_over(log)
    with log.naming():
        for state, record in fold(log):
            requests.queued(state, record)
            if (line := requests.ended(state, record)) is not None:
                yield line


def step_lines(log: CheckedLog | Path, findings: Findings | None = None) -> Iterator[StepLine]:
    """Yield a line for each step that ran or failed. `log`: the log or its folder. Steps that were decided
    before the log's first record are omitted. `findings`: see CheckedLog. Raises LogError if the log is
    missing or damaged.
    """
    log = CheckedLog(log, findings=findings) if isinstance(log, Path) else log
    admitted = encoded = preempted = 0
    state = log.first_state()
    # None stands for a step that was decided before the log's first record.
    decided: deque[StepLine | None] = deque([None] * len(state.flights))
    is_before = state.is_open
    with log.naming():
        for state, record in fold(log):
            match record.event:
                case ev.Preempted():
                    preempted += 1
                case ev.Scheduled(encode=encode):
                    encoded += len(encode)
                case ev.Admitted(encode=encode):
                    admitted, encoded = admitted + 1, encoded + len(encode)
                case ev.Encoded(request_id=name, index=index, until=until):
                    encoded += until >= state.requests[name].media_work[index]
                case ev.Dispatched() | ev.Executed() | ev.Failed() if state.is_open:
                    line = _decided(state, state.open_step(), admitted, encoded, preempted)
                    decided.append(None if is_before else line)
                    admitted = encoded = preempted = 0
                    is_before = False
            match record.event:
                case ev.Executed(device_ns=device_ns):
                    landed = decided.popleft()
                    if landed is not None:
                        landed.device_ms = device_ns / 1e6
                        yield landed
                case ev.Failed(error=error):
                    for failed in filter(None, decided):
                        failed.failed = error
                        yield failed
                    decided.clear()


def _decided(state: State, step: Flight, admitted: int, encoded: int, preempted: int) -> StepLine:
    return StepLine(
        step=step.step,
        num_rows=len(step.rows),
        num_tokens=step.num_tokens,
        num_admitted=admitted,
        num_encoded=encoded,
        num_preempted=preempted,
        num_running=len(state.running),
        num_waiting=len(state.waiting),
        num_free_blocks=state.blocks.num_free,
        encoder_used=state.encoder.used,
    )
