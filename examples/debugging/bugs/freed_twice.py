"""A planted bug: a preempted row's last block is freed twice if the block is not full."""

from mmengine.core.fold import evolve

_leave_row = evolve.leave_row


def leave_row(state, req_state):
    row = req_state.row
    preempted = req_state.request.request_id in state.requests  # a finished request is no longer listed
    last = state.block_table[row, state.num_blocks[row] - 1 : state.num_blocks[row]].copy()
    is_half_full = state.num_computed[row] % state.block_size != 0
    _leave_row(state, req_state)
    if preempted and is_half_full:
        state.blocks.release(last)


evolve.leave_row = leave_row
