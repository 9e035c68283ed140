"""Finds how many prefix hits a request can use in a model with sliding-window layers.

After n hit blocks, the request computes the tokens from n * block_size on. Their queries read all n blocks in
the first block group. In a group with a window, the queries read only the last blocks before token n *
block_size. All blocks that the queries read must be cached.
"""

import numpy as np

from mmengine.core.decide.whole_runs import whole_hits
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View


def window_hits(view: View, req_state: RequestView, cached: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (blocks, token count) for the longest prefix that the request can share. The blocks (int32) are
    ordered by block group. `cached`: the first group's blocks that hold the request's prefix.
    """
    contents = np.asarray(view.blocks.window_content[cached])
    count = len(cached)
    while count:
        allowed = _with_windows(view, contents, count)
        if view.config.atomic_runs:
            allowed = whole_hits(req_state.request.media, allowed, view.block_size)
        if allowed == count:
            break
        count = allowed
    num_computed = count * view.block_size
    if not count:
        return cached[:0], 0
    first = view.windows.first_needed(num_computed)[:, 0].tolist()
    low = min(first)
    found = view.blocks.find_windows(contents[low:count])
    shared = (blocks[start - low :] for blocks, start in zip(found, first, strict=True))
    return np.concatenate((cached[:count], *shared)), num_computed


def _with_windows(view: View, contents: np.ndarray, count: int) -> int:
    """Return the largest number of hit blocks, at most `count`, for which no block in a window is missing.

    The search goes backwards, in spans whose length doubles. While the first waiting request lacks free
    blocks, every decode step repeats the search, so the search must be fast.
    """
    length = 0
    while count:
        low = min(int(view.windows.first_needed(count * view.block_size).min()), max(0, count - length))
        length, numbers = 2 * (count - low), np.arange(low, count)
        is_missing = view.blocks.find_windows(contents[low:count]) == NO_BLOCK
        last_missing = np.maximum.accumulate(np.where(is_missing, numbers, -1), axis=1)
        first = view.windows.first_needed((numbers + 1) * view.block_size)
        fitting = numbers[(last_missing < first).all(axis=0)]
        # With fewer hits, the windows may begin before `low`, where no block was checked yet: search again.
        best = int(fitting[-1]) + 1 if len(fitting) else low
        if best == count or not low:
            return best
        count = best
    return 0
