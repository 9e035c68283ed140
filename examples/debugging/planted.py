"""Add a bug to mmengine when this module is imported.

An encoder output stays in the cache as long as a running request references it. The bug concerns a request
whose last chunk ended inside an image. If the request is preempted, it does not release its reference to the
image's encoder output. Each such preemption makes a part of the encoder cache unusable. In the end, no
request with a new image can start, and the engine waits forever. vLLM had this bug (#31857).
"""

from mmengine.core.fold import evolve

_leave_row = evolve.leave_row


def leave_row(state, req_state, *rest):
    """Release the row, the blocks and the media of `req_state`, except the references that the bug keeps."""
    preempted = req_state.request.request_id in state.requests  # a finished request is no longer listed
    computed = int(state.num_computed[req_state.row])
    if preempted:
        for index in sorted(req_state.held_media):
            item = req_state.request.media[index]
            if item.start < computed < item.end:
                req_state.held_media.discard(index)  # the bug: this reference is never released
    _leave_row(state, req_state, *rest)


evolve.leave_row = leave_row
