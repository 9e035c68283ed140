"""A bug to look for: importing this module plants it into mmengine.

An encoder output stays in the cache as long as a running request references it. With the bug, a request
that is preempted while its last chunk ended inside an image forgets to give that reference back. Nothing
happens at first. Each time, a little of the encoder cache can never be used again, and one night it is
full: no request with a new image can start, and the engine waits for ever. vLLM had this one (#31857).
"""

from mmengine.core.fold import evolve

_leave_row = evolve.leave_row


def leave_row(state, req_state, *rest):
    """`req_state` gives up its row, its blocks and its media; but not all of them."""
    preempted = req_state.request.request_id in state.requests  # who ended is not there any more
    computed = int(state.num_computed[req_state.row])
    if preempted:
        for index in sorted(req_state.held_media):
            item = req_state.request.media[index]
            if item.start < computed < item.end:
                req_state.held_media.discard(index)  # here is the bug: nobody releases it
    _leave_row(state, req_state, *rest)


evolve.leave_row = leave_row
