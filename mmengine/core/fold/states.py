"""Applies events about recurrent states: each row's slot, and the cached states."""

import numpy as np

from mmengine.core.state.columns import NEVER
from mmengine.core.state.state import State
from mmengine.core.state.state_slots import any_due, next_kept
from mmengine.events import vocabulary as ev


def take_state(state: State, event: ev.AdmittedWithState, num_computed: int) -> None:
    row = event.row
    state.states.take(event.state_slot, event.state_from)
    state.state_slot[row], state.num_shared[row] = event.state_slot, event.num_shared
    state.keep_at[row] = _next(state, row, num_computed)


def release_state(state: State, row: int) -> None:
    state.states.release(int(state.state_slot[row]))
    state.state_slot[row], state.keep_at[row], state.num_shared[row] = ev.NO_STATE, NEVER, 0


def keep(state: State, event: ev.StatesKept) -> None:
    kept = np.stack(
        [np.frombuffer(each, np.int32) for each in (event.rows, event.num_tokens, event.slots)], 1
    )
    for row, num_tokens, slot in kept.tolist():
        block = int(state.block_table[row, num_tokens // state.block_size - 1])
        state.states.keep(slot, int(state.blocks.index.content[block]), block)
    state.step_kept.append(kept)


def pass_kept(state: State, rows: np.ndarray) -> None:
    """Advance `keep_at` of each row in `rows` past the tokens that the row has computed. `keep_at` is the
    next position at which the row's state is cached. The current step's drafts are not yet counted as
    computed, because they may be rejected.
    """
    if not any_due(state.keep_at, state.num_computed):
        return
    certain = state.num_computed[rows] - state.scheduled_drafts[rows]
    places = (state.keep_at[rows] <= certain).nonzero()[0]
    for row, after in zip(rows[places].tolist(), certain[places].tolist(), strict=True):
        state.keep_at[row] = _next(state, row, after)


def _next(state: State, row: int, after: int) -> int:
    req_state, config = state.requests_by_row[row], state.config
    if not config.enable_prefix_caching or req_state is None:
        return int(NEVER)
    shared = int(state.num_shared[row])
    return next_kept(after, req_state.num_prompt, shared, config.snapshot_every, state.block_size)
