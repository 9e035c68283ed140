"""Checks the KV block invariants: each block's holders, and the blocks that a row (a running request) holds
in each block group (vLLM: KV cache group). invariants.py lists the invariants' names.

Each function yields a sentence per violation.
"""

from collections.abc import Iterator

import numpy as np

from mmengine.core.state.columns import RUNS_ON
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.state import State
from mmengine.core.state.uniform_window import first_needed


def broken_references(state: State) -> Iterator[str]:
    """Check that each block's reference count equals the number of its holders: rows, store fetches and
    session leases.
    """
    held = _held_blocks(state)
    wrong = np.flatnonzero(held != state.blocks.references)
    if len(wrong):
        block = int(wrong[0])
        yield (
            f"block {block} has the reference count {int(state.blocks.references[block])}, but rows, store "
            f"fetches and session leases hold it {int(held[block])} times"
        )
    if held[0]:
        yield f"block 0, the dummy block, is held {int(held[0])} times, but must never be held"


def _held_blocks(state: State) -> np.ndarray:
    held = np.zeros(state.blocks.num_blocks, np.int32)
    for row in (*state.running.tolist(), *state.leaving):
        table = state.block_table[row, : state.num_blocks[row]]
        np.add.at(held, table[table != 0] if state.config.uniform_window else table, 1)
        if state.num_groups > 1:
            np.add.at(held, state.windows.held_by(row, state.num_blocks[row]), 1)
    for name in state.fetching:
        np.add.at(held, state.requests[name].fetch_blocks, 1)
    np.add.at(held, state.sessions.leased(), 1)
    return held


def broken_blocks(state: State) -> Iterator[str]:
    """Check that each block is either held or free, and that no free block is listed twice."""
    free = state.blocks.free_list.order()
    if len(free) != state.blocks.num_free or len(np.unique(free)) != len(free):
        yield (
            f"the free list counts {state.blocks.num_free} blocks, but has {len(free)} entries with "
            f"{len(np.unique(free))} different blocks"
        )
    expected = np.flatnonzero(_held_blocks(state)[1:] == 0) + 1
    if not np.array_equal(np.sort(free), expected):
        lost = np.setxor1d(free, expected)
        yield (
            f"{len(lost)} blocks are both held and free, or neither held nor free; the first is block "
            f"{int(lost[0])}"
        )


def broken_host_blocks(state: State) -> Iterator[str]:
    """Check that each block in the host pool is free, or holds the KV of a single request."""
    swapped = [req_state.host_blocks for req_state in state.requests.values()]
    placed = np.sort(np.concatenate([*swapped, state.free_host_blocks]))
    if not np.array_equal(placed, np.arange(state.config.swap_blocks)):
        yield (
            f"{len(np.unique(placed))} different host blocks are listed {len(placed)} times as held or free; "
            f"each of the {state.config.swap_blocks} host blocks must be listed once"
        )


def broken_windows(state: State) -> Iterator[str]:
    """Check that each row holds the sliding-window blocks that its next query reads. Between steps, a row
    must hold no other sliding-window blocks.
    """
    rows = state.running
    if len(rows) and state.config.uniform_window:
        yield from _broken_uniform_window(state, rows)
    if state.num_groups == 1 or not len(rows):
        return
    windows = state.windows
    numbers = np.arange(windows.tables.shape[2])
    tables, first = windows.tables[:, rows], windows.first_held[:, rows]
    due = (numbers >= first[..., None]) & (numbers < state.num_blocks[rows][:, None])
    for group, place, number in np.argwhere((tables != 0) != due)[:1].tolist():
        yield (
            f"row {int(rows[place])} holds block {int(tables[group, place, number])} at position {number} of "
            f"its block table in group {group + 1}; it should hold blocks at the positions "
            f"{int(first[group, place])} to {int(state.num_blocks[rows[place]]) - 1}"
        )
    needed = windows.first_needed(state.num_computed[rows] - state.scheduled[rows])
    runs_on = state.ended[rows] == RUNS_ON
    lacks = (first > needed) & (state.in_flight[rows] == 0)
    settled = runs_on & (state.in_flight[rows] == 0) & (state.scheduled[rows] == 0)
    settled &= not state.has_lazy_windows
    for group, place in np.argwhere(lacks | (settled & (first != needed)))[:1].tolist():
        yield (
            f"in group {group + 1}, row {int(rows[place])} holds blocks from position "
            f"{int(first[group, place])} of its block table on; its next query reads from position "
            f"{int(needed[group, place])} on"
        )
    yield from _wrong_contents(state, rows, tables, due & (numbers < state.num_filled[rows][:, None]))


def _broken_uniform_window(state: State, rows: np.ndarray) -> Iterator[str]:
    """Check `rows` if the only block group has a sliding window (`uniform_window`). The block table has 0
    in place of released blocks.
    """
    numbers = np.arange(state.block_table.shape[1])
    needed = first_needed(state.config, state.num_computed[rows] - state.scheduled[rows])
    idle = (state.in_flight[rows] == 0) & (state.ended[rows] == RUNS_ON)
    is_due = (numbers >= needed[:, None]) & (numbers < state.num_blocks[rows][:, None])
    is_held = state.block_table[rows] != 0
    for place, number in np.argwhere((is_due != is_held) & idle[:, None])[:1].tolist():
        yield (
            f"row {int(rows[place])} {'holds a' if is_held[place, number] else 'lacks the'} block at "
            f"position {number} of its block table; it should hold blocks at the positions "
            f"{int(needed[place])} to {int(state.num_blocks[rows[place]]) - 1}"
        )


def _wrong_contents(state: State, rows: np.ndarray, tables: np.ndarray, filled: np.ndarray) -> Iterator[str]:
    """Check that each block in a window group has the same content as the block at the same position in the
    row's first group. `filled` marks the full blocks: bool [group, row, position].
    """
    groups, places, numbers = filled.nonzero()
    keys = state.blocks.windows.keys[tables[groups, places, numbers]]
    contents = state.blocks.window_content[state.block_table[rows[places], numbers]]
    wrong = (keys != NO_CONTENT) & (contents != NO_CONTENT)
    wrong &= keys != contents * state.windows.num_groups + groups
    for place in np.flatnonzero(wrong)[:1].tolist():
        yield (
            f"row {int(rows[places[place]])} holds other content at position {int(numbers[place])} of its "
            f"block table in group {int(groups[place]) + 1} than in the first group"
        )
