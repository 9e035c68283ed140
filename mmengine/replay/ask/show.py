"""A log as tables: one line a request, one line a step. Folds the log; makes no decisions."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmengine.core.fold import sessions
from mmengine.core.state.draft_counts import drafted
from mmengine.core.state.flight import Flight
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.ask.envelopes import kind_of
from mmengine.replay.checked import CheckedLog
from mmengine.replay.timeline import fold, taken_tokens


@dataclass(slots=True)
class RequestLine:
    """One request's life. Times are ns since its arrival; -1 where it did not come so far."""

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
    api: str = ""  # through which it was asked, as its envelope says
    num_given_tokens: int = 0  # of its answer, that came along: another engine gave them


@dataclass(slots=True)
class StepLine:
    """One step: its batch and what was left when it was decided."""

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
    """The lines of the requests that live, kept up to date by each record with the state before it."""

    def __init__(self) -> None:
        self._live: dict[str, RequestLine] = {}  # an id may come again once its request has ended

    def from_before(self, log: CheckedLog) -> list[RequestLine]:
        """Lines of requests that are older than what the log holds of them. Their times count from there."""
        state, first = log.first_state(), log.first
        if first is None:
            return []
        for name, req_state in state.requests.items():
            row, queued = req_state.row, req_state.request
            tokens = len(req_state.tokens) if row < 0 else int(state.num_tokens[row])
            line = RequestLine(name, req_state.num_prompt, len(queued.media), first.mono_ns, first.step)
            line.num_output_tokens = tokens - req_state.num_prompt
            line.num_cached_tokens, line.api = max(0, req_state.num_cached), kind_of(queued.envelope)
            self._live[name] = line
        return list(self._live.values())

    def queued(self, state: State, record: Record) -> RequestLine | None:
        """The line of a request that this record begins, given the state before it."""
        match record.event:
            case ev.Queued(request_id=name, prompt=prompt, media=media, outputs=outputs, envelope=envelope):
                if name in state.sessions.of_request:
                    whole = sessions.whole(state, record.event)
                    prompt, media = whole.prompt, whole.media
                line = RequestLine(name, len(prompt) // 4, len(media), record.mono_ns, record.step)
                line.num_output_tokens = line.num_given_tokens = len(outputs) // 4
                line.api = kind_of(envelope)
                self._live[name] = line
                return line
        return None

    def ended(self, state: State, record: Record) -> RequestLine | None:
        """Take the record in; the line of a request that it ends."""
        event = record.event
        match event:
            case ev.Admitted(request_id=name) if self._live[name].num_preemptions == 0:
                self._live[name].num_cached_tokens = len(event.cached_blocks) // 4 * state.block_size
            case ev.Preempted(request_id=name):
                self._live[name].num_preemptions += 1
            case ev.Executed():
                self._take_drafts(state, event)
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

    def _take_drafts(self, state: State, event: ev.Executed) -> None:
        sampled = state.sampled_rows()
        found = drafted(state, sampled, event)
        if found is None:
            return
        for row, proposed, accepted in zip(sampled[found.places].tolist(), *found[2:], strict=True):
            req_state = state.requests_by_row[row]
            if req_state is not None:
                line = self._live[req_state.request.request_id]
                line.num_drafts += int(proposed)
                line.num_accepted += int(accepted)


def request_lines(folder: Path) -> list[RequestLine]:
    """Every request of a log, in order of arrival. Raises what `verify` raises."""
    log = CheckedLog(folder)
    requests = _Requests()
    lines = requests.from_before(log)
    with log.naming():
        for state, record in fold(log):
            if (line := requests.queued(state, record)) is not None:
                lines.append(line)
            requests.ended(state, record)
    return lines


def ended_requests(log: CheckedLog) -> Iterator[RequestLine]:
    """Every request of a log, when it ends."""
    requests = _Requests()
    requests.from_before(log)
    with log.naming():
        for state, record in fold(log):
            requests.queued(state, record)
            if (line := requests.ended(state, record)) is not None:
                yield line


def step_lines(log: CheckedLog | Path) -> Iterator[StepLine]:
    """Every step of a log (or of the one in a folder) that ran or failed, but for those that were decided
    before what the log holds. Raises what `verify` raises."""
    log = CheckedLog(log) if isinstance(log, Path) else log
    admitted = encoded = preempted = 0
    state = log.first_state()
    decided: deque[StepLine | None] = deque([None] * len(state.flights))  # None: decided before
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
