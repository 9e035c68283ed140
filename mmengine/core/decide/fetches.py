"""Decides whether a waiting request fetches KV blocks from a block store before it is admitted."""

from typing import Literal

import numpy as np

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

Passed = Literal["passed"]
PASSED: Passed = "passed"  # another request fetches the same blocks


def decide_fetch(
    view: View, req_state: RequestView, cached: np.ndarray, new: np.ndarray
) -> ev.Fetched | Passed:
    """Return FETCHED for a fetch into the free blocks `new`, or PASSED while another request fetches the same
    blocks. `cached`: the prefix hits' blocks, which precede the fetched blocks. Both arrays are int32.
    """
    if any(_same_next(view, req_state, view.requests[name], len(cached)) for name in view.fetching):
        return PASSED
    return ev.Fetched(req_state.request.request_id, cached.tobytes(), new.tobytes())


def _same_next(view: View, one: RequestView, other: RequestView, number: int) -> bool:
    """Return whether `other` is fetching its block `number`, and both requests are equal up to this block's
    end.
    """
    end = (number + 1) * view.block_size
    first = len(other.fetch_blocks) - other.num_fetching
    return (
        first <= number < len(other.fetch_blocks)
        and np.array_equal(one.tokens[:end], other.tokens[:end])
        and one.request.cache_salt == other.request.cache_salt
        and digest_of(one.request.adapter) == digest_of(other.request.adapter)
        and _media_before(one, end) == _media_before(other, end)
    )


def _media_before(req_state: RequestView, end: int) -> list[tuple[bytes, tuple[tuple[int, int], ...]]]:
    return [(item.mm_hash, item.runs) for item in req_state.request.media if item.runs[0][0] < end]
