"""Lists the requests of a log that have not ended, with the tokens that they had so far."""

from pathlib import Path

import msgspec

from mmengine.core.state.request_state import NO_ROW, RequestState
from mmengine.core.state.state import State
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.findings import Findings


class PendingRequest(msgspec.Struct, frozen=True):
    """A request that has not ended. `state`: "waiting", "preempted" or "running" at the log's end.

    `output_tokens`: the answer's tokens in the log. A host delivers tokens only after the log has them, so
    these include all tokens that the client can have.
    """

    request_id: str
    state: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: list[int]


def pending_requests(folder: Path, findings: Findings | None = None) -> list[PendingRequest]:
    """Return the requests that have not ended at the log's end, in the order of arrival. `findings`: as in
    CheckedLog. Raises `verify`'s errors.
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
