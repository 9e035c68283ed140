"""Allocates blocks for several block groups (vLLM's KV cache groups) by vLLM's rules.

vLLM allocates row by row. Each row first frees the blocks that its sliding windows have passed, even if its
own allocation then fails. The next row may get the freed blocks. A decision therefore contains at most one
row that frees or gets blocks.
"""

import numpy as np
from msgspec.structs import replace

from mmengine.core.decide.admission import blocks_for
from mmengine.core.decide.running import Wanted
from mmengine.core.decide.start import Start
from mmengine.core.state.blocks import further_blocks
from mmengine.core.state.lazy_windows import settled_tokens
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


def active_rows(view: View, wanted: Wanted) -> tuple[np.ndarray, np.ndarray]:
    """Return (active, further). `active`: the rows that free or get blocks, as indices into `wanted.rows`,
    intp. `further`: the number of blocks that each row in `wanted.rows` gets per group, int32.
    """
    further = np.zeros(len(wanted.rows), np.int32)
    short, counts = further_blocks(view, view.config, wanted.rows, wanted.tokens)
    further[short] = counts
    is_ripe = settled_tokens(view, wanted.rows) >= view.windows.release_at[wanted.rows]
    return ((further > 0) | is_ripe).nonzero()[0], further


def blocks_of_row(view: View, row: int, count: int) -> np.ndarray | None:
    """Return the blocks that the row gets, `count` per group, int32, in the order of `by_number`. The blocks
    that the row's windows have passed count as free. Returns None if too few blocks are free.
    """
    settled = int(settled_tokens(view, np.array([row]))[0])
    front, back = view.blocks.order_after_release(view.windows.skipped(row, settled))
    needed, num_free = count * view.num_groups, view.blocks.num_free
    if needed > len(front) + num_free + len(back):
        return None
    line = np.concatenate((front, view.blocks.peek(min(num_free, needed)), back))
    return by_number(view, line[:needed])


def by_number(view: View, blocks: np.ndarray) -> np.ndarray:
    """Return a row's new blocks in the order that ADMITTED and SCHEDULED use: by position in the block table,
    then by group. `blocks`: in vLLM's order, group by group.
    """
    of_group = blocks.reshape(view.num_groups, len(blocks) // view.num_groups)
    return of_group[np.asarray(view.windows.order)].T.ravel()


def with_blocks_by_number(view: View, admitted: ev.Admitted) -> ev.Admitted:
    """Return `admitted` with its new blocks in the order of `by_number`. `admitted` lists the blocks group
    by group.
    """
    new = np.frombuffer(admitted.new_blocks, np.int32)
    return replace(admitted, new_blocks=by_number(view, new).tobytes())


def num_new_blocks(view: View, req_state: RequestView, start: Start, length: int) -> int:
    """Return how many new blocks the request needs to start with a chunk of `length` tokens. If
    `admission_reserve` is "prompt", returns at least the number of blocks that the whole prompt needs. Prefix
    hits are not counted.
    """
    hits = start.num_computed // view.block_size
    chunk = (blocks_for(view, start.num_computed + length) - hits) * view.num_groups
    if view.config.admission_reserve != "prompt":
        return chunk
    prompt = -(-len(req_state.tokens) // view.block_size)
    of_windows = np.minimum(prompt, _most_held(view)) - hits
    return max(chunk, max(prompt - hits, 0) + int(np.maximum(of_windows, 0).sum()))


def _most_held(view: View) -> np.ndarray:
    """Return the maximum number of blocks that a request holds in each group with a window, int64 [group]."""
    config = view.config
    in_flight = config.token_budget * config.max_in_flight
    num_tokens = np.minimum(view.windows.windows[:, 0] - 1 + in_flight, config.max_model_len)
    return np.asarray(-(-num_tokens // config.block_size) + 1)
