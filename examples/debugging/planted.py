"""A bug to look for: importing this module plants it into mmengine.

An encoder output stays in the cache as long as a running request references it. With the bug, a request
that is preempted while its last chunk ended inside an image forgets to give that reference back. Nothing
happens at first. Each time, a little of the encoder cache can never be used again, and one night it is
full: no request with a new image can start, and the engine waits for ever. vLLM had this one (#31857).
"""

from mmengine.core import evolve

_leave_row = evolve.leave_row


def leave_row(state, known, *rest):
    """`known` gives up its row, its blocks and its media; but not all of them."""
    preempted = known.request.request_id in state.requests  # who ended is not there any more
    computed = int(state.num_computed[known.row])
    if preempted:
        for index in sorted(known.held_media):
            item = known.request.media[index]
            if item.start < computed < item.end:
                known.held_media.discard(index)  # here is the bug: nobody releases it
    _leave_row(state, known, *rest)


evolve.leave_row = leave_row
