"""Decides whether a waiting request fetches blocks from a store instead of being admitted."""

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
    """Return FETCHED into the blocks `new`, after the hits `cached` (int32 both), or PASSED while another
    request fetches the same blocks.
    """
    if any(_same_next(view, req_state, view.requests[name], len(cached)) for name in view.fetching):
        return PASSED
    return ev.Fetched(req_state.request.request_id, cached.tobytes(), new.tobytes())


def _same_next(view: View, one: RequestView, other: RequestView, number: int) -> bool:
    """Return whether both requests have the same block `number` and `other` fetches it. Earlier blocks are
    cached.
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
