"""Applies events to block groups with a sliding window: records block contents, and releases blocks that rows
no longer need.
"""

import numpy as np

from mmengine.core.state.flight import Flight
from mmengine.core.state.lazy_windows import chain_digests, settled_tokens
from mmengine.core.state.state import State


def release_windows(state: State, flight: Flight) -> None:
    """Release blocks that have left the sliding windows of the step's rows. Call this function after the
    step's tokens were applied and rejected drafts were removed.
    """
    released = state.windows.release(flight.rows, computed_before_queries(state, flight))
    if len(released):
        state.blocks.release_shared(released)


def computed_before_queries(state: State, flight: Flight) -> np.ndarray:
    """Return the lowest position of a later query for each row of the step: its number of computed tokens."""
    computed = state.num_computed[flight.rows]
    if flight.num_computed is not None:  # a later step in flight may begin at flight.num_computed
        computed = np.minimum(computed, flight.num_computed)
    return computed


def release_skipped(state: State, rows: np.ndarray) -> None:
    """Release blocks that have left the rows' sliding windows, in vLLM's order: by row, then by group. Call
    this function before the rows get blocks for their next chunks.
    """
    settled = settled_tokens(state, rows)
    ripe = settled >= state.windows.release_at[rows]
    for row, computed in zip(rows[ripe].tolist(), settled[ripe].tolist(), strict=True):
        for blocks in state.windows.skipped(row, computed):
            state.blocks.release(blocks)
        state.windows.release(np.array([row]), np.array([computed]))


def release_blocks(state: State, row: int) -> None:
    """Release all blocks of a row."""
    num_blocks = int(state.num_blocks[row])
    first = state.block_table[row, :num_blocks]
    if state.config.uniform_window:
        first = first[first != 0]
    if state.has_lazy_windows:
        others = state.windows.by_group(row, num_blocks)
        for blocks in state.windows.in_settings_order(first, others):
            state.blocks.release(blocks)
    else:
        state.blocks.release(first)
        if state.num_groups > 1:
            state.blocks.release(state.windows.held_by(row, num_blocks))
    if state.num_groups > 1:
        state.windows.clear_row(row, num_blocks)


def fill_windows(state: State, blocks: np.ndarray, contents: np.ndarray) -> None:
    """Record the contents of window groups' blocks. `blocks`: int32 [group, n]; released blocks are 0."""
    state.blocks.windows.insert(blocks, contents)
    state.step_filled.append(blocks[blocks != 0])


def fill_lazy_windows(state: State, row: int, first: int, last: int, extras: dict[int, bytes]) -> None:
    """Record the contents of a row's blocks [first, last) in groups with a window, by vLLM's rules."""
    table, contents = state.block_table[row], state.blocks.window_content
    parent = int(contents[table[first - 1]]) if first else 0
    digests = np.array(chain_digests(parent, state.block_tokens[row, first:last], extras))
    contents[table[first:last]] = digests
    fill_windows(state, state.windows.tables[:, row, first:last].copy(), digests)
