"""Decides which recurrent states a step keeps, so that later prefix hits can continue from these states."""

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.state_slots import any_due, next_kept
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


def keep_states(view: View) -> ev.StatesKept | None:
    """Return STATESKEPT for the current step's rows, or None if no state is due or no slot is free.

    The step's rows must have been scheduled. If there are too few slots, the first due states, in the order
    of the step's rows, get none.
    """
    if not any_due(view.keep_at, view.num_computed):
        return None
    rows = view.step_rows
    certain = view.num_computed[rows] - view.scheduled_drafts[rows]
    due = (view.keep_at[rows] <= certain).nonzero()[0]
    if not len(due):
        return None
    wanted = _wanted(view, rows[due], certain[due])
    slots = view.states.peek(len(wanted))
    if not len(slots):
        return None
    kept = np.array(wanted[-len(slots) :], np.int32)
    return ev.StatesKept(kept[:, 0].tobytes(), kept[:, 1].tobytes(), slots.tobytes())


def _wanted(view: View, rows: ReadOnlyArray, certain: np.ndarray) -> list[tuple[int, int]]:
    """Return (row, n) for each due state: the row's state after its first n tokens. A state is left out
    if the contents of the block that ends with token n are not recorded, or already have a kept state.
    """
    size, every = view.block_size, view.config.snapshot_every
    wanted, seen = list[tuple[int, int]](), set[int]()
    for row, end in zip(rows.tolist(), certain.tolist(), strict=True):
        num_prompt, shared = view.requests_by_row[row].num_prompt, int(view.num_shared[row])
        filled, place = int(view.num_filled[row]) * size, int(view.keep_at[row])
        while place <= min(end, filled):
            content = int(view.blocks.content[view.block_table[row, place // size - 1]])
            if content not in seen and content != NO_CONTENT and view.states.find(content) == ev.NO_STATE:
                seen.add(content)
                wanted.append((row, place))
            place = next_kept(place, num_prompt, shared, every, size)
    return wanted
