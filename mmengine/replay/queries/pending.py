"""Lists the requests of a log that have not ended, with the tokens that they have received so far."""

from pathlib import Path

import msgspec

from mmengine.core.state.request_state import NO_ROW, RequestState
from mmengine.core.state.state import State
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings


class PendingRequest(msgspec.Struct, frozen=True):
    """A request that has not ended. `state`: "waiting", "preempted" or "running" at the log's end.

    `output_tokens`: the tokens of the answer in the log. Tokens are logged before they are delivered, so
    these include all tokens that the client received.
    """

    request_id: str
    state: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: list[int]


def pending_requests(folder: Path, findings: Findings | None = None) -> list[PendingRequest]:
    """Return the requests that have not ended at the log's end, in arrival order. `findings`: see CheckedLog.
    Raises the same errors as mmengine.replay.verify.
    """
    log = CheckedLog(folder, findings=findings)
    state = log.first_state()
    for record in log:
        with log.naming(record):
            log.apply(state, record.event)
    return [_pending(state, req_state) for req_state in state.requests.values()]


def _pending(state: State, req_state: RequestState) -> PendingRequest:
    is_running = req_state.row != NO_ROW
    ran = "preempted" if req_state.preempted else "waiting"
    return PendingRequest(
        req_state.request.request_id,
        "running" if is_running else ran,
        req_state.num_prompt,
        req_state.request.sampling.max_tokens,
        state.known_tokens(req_state)[req_state.num_prompt :].tolist(),
    )
