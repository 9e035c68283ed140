"""Finds how many prefix hits a request can use in a model with sliding-window layers.

After a hit of n blocks the request computes the tokens from n * block_size on. The queries of these tokens
read all n blocks of the first block group. In each group with a window they read only the last blocks before
n * block_size. All these blocks must be cached.
"""

import numpy as np

from mmengine.core.decide.whole_runs import whole_hits
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View


def window_hits(view: View, req_state: RequestView, cached: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (blocks, token count) for the longest prefix that the request can share. The blocks, int32,
    are each block group's blocks in turn. `cached`: the first group's blocks that hold the request's prefix.
    """
    contents = np.asarray(view.blocks.content[cached]).tolist()
    count = len(cached)
    while count:
        found = _with_windows(view, contents, count)
        allowed = found
        if view.config.atomic_runs:
            allowed = whole_hits(req_state.request.media, found, view.block_size)
        if allowed == count:
            break
        count = allowed
    num_computed = count * view.block_size
    first = view.windows.first_needed(num_computed)[:, 0].tolist() if count else []
    shared = [
        view.blocks.find_window(content, group)
        for group, start in enumerate(first)
        for content in contents[start:count]
    ]
    return np.concatenate((cached[:count], np.array(shared, np.int32))), num_computed


def _with_windows(view: View, contents: list[int], count: int) -> int:
    """Return how many of the first `count` blocks a request can share, considering only the windows."""
    find = view.blocks.find_window
    number = count
    first = view.windows.first_needed(count * view.block_size)[:, 0].tolist()
    while number > min(first, default=0):
        number -= 1
        needed = (group for group, start in enumerate(first) if start <= number)
        if any(find(contents[number], group) == NO_BLOCK for group in needed):
            count = number
            first = view.windows.first_needed(count * view.block_size)[:, 0].tolist()
    return count
