"""Finds how many prefix hits a request can use in a model whose layers have windows.

After a hit of n blocks the request computes from token n * block_size on. Its queries read all n blocks of
the first group, and in each group with a window the last blocks before that token. A hit needs all of them.
"""

import numpy as np

from mmengine.core.decide.whole_runs import whole_hits
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View


def window_hits(view: View, req_state: RequestView, cached: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the blocks that the request can share, int32, one group after the other, and the number of
    tokens in them. `cached`: the first group's blocks that hold the request's prefix.
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
    """Return how many of the first `count` blocks a request can share, if only windows limit them."""
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
