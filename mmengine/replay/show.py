"""A log as tables: one line a request, one line a step. Folds the log; makes no decisions."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mmengine.core.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record
from mmengine.replay.checked import CheckedLog
from mmengine.replay.timeline import fold


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
    first_token_ns: int = -1
    end_ns: int = -1
    end_step: int = -1
    finish_reason: str = ""
    detail: str = ""


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


def request_lines(folder: Path) -> list[RequestLine]:
    """Every request of a log, in order of arrival. Raises what `verify` raises."""
    log = CheckedLog(folder)
    lines: list[RequestLine] = []
    by_id: dict[str, RequestLine] = {}  # an id may come again once its request has ended
    with log.naming():
        for state, record in fold(log):
            event = record.event
            match event:
                case ev.Queued(request_id=name):
                    num_prompt = len(event.prompt) // 4
                    line = RequestLine(name, num_prompt, len(event.media), record.mono_ns, record.step)
                    by_id[name] = line
                    lines.append(line)
                case ev.Admitted(request_id=name) if by_id[name].num_preemptions == 0:
                    by_id[name].num_cached_tokens = len(event.cached_blocks) // 4 * state.block_size
                case ev.Preempted(request_id=name):
                    by_id[name].num_preemptions += 1
                case ev.Executed():
                    _count_tokens(state, record, by_id)
                case ev.Finished(request_id=name) if name in state.requests:
                    line = by_id[name]
                    line.finish_reason, line.detail = event.reason, event.detail
                    line.end_ns, line.end_step = record.mono_ns - line.queued_ns, record.step
    return lines


def _count_tokens(state: State, record: Record, lines: dict[str, RequestLine]) -> None:
    sampled = state.sampled_rows().tolist()
    broken = {index for index, _ in record.event.errors}
    for index, row in enumerate(sampled):
        if index in broken or state.requests_by_row[row] is None:  # its request left while the step ran
            continue
        line = lines[state.requests_by_row[row].request.request_id]
        line.num_output_tokens += 1
        if line.first_token_ns < 0:
            line.first_token_ns = record.mono_ns - line.queued_ns


def step_lines(folder: Path) -> Iterator[StepLine]:
    """Every step of a log that ran or failed. Raises what `verify` raises."""
    log = CheckedLog(folder)
    admitted = encoded = preempted = 0
    decided: deque[StepLine] = deque()  # in flight
    with log.naming():
        for state, record in fold(log):
            match record.event:
                case ev.Preempted():
                    preempted += 1
                case ev.Scheduled(encode=encode):
                    encoded += len(encode)
                case ev.Admitted(encode=encode):
                    admitted, encoded = admitted + 1, encoded + len(encode)
                case ev.Dispatched() | ev.Executed() | ev.Failed() if state.is_open:
                    decided.append(_decided(state, admitted, encoded, preempted))
                    admitted = encoded = preempted = 0
            match record.event:
                case ev.Executed(device_ns=device_ns):
                    line = decided.popleft()
                    line.device_ms = device_ns / 1e6
                    yield line
                case ev.Failed(error=error):
                    for line in decided:
                        line.failed = error
                        yield line
                    decided.clear()


def _decided(state: State, admitted: int, encoded: int, preempted: int) -> StepLine:
    step = state.open_step()
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
