"""Keeps chunks and prefix hits from splitting tokens that one step must compute together.

In some models an image's tokens attend to one another in both directions, so each token's KV depends on the
whole image. The setting `atomic_runs` keeps each run (adjacent tokens from an image or video) in a single
step. The setting `whole_prompt` keeps the whole prompt in a single step.
"""

from collections.abc import Sequence

from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.request import MediaItem, num_before, run_start


def whole_chunk(view: View, req_state: RequestView, start: int, length: int) -> int:
    """Return the length of the largest allowed chunk that begins at `start`, at most `length` tokens.

    Returns 0 if the next run, or the rest of the prompt, needs more than `length` tokens.
    """
    if view.config.whole_prompt and start + length < req_state.num_prompt:
        return 0
    if view.config.atomic_runs:
        return run_start(req_state.request.media, start + length) - start
    return length


def least_chunk(view: View, req_state: RequestView, start: int) -> int:
    """Return the minimum length of the request's next chunk, in tokens."""
    if view.config.whole_prompt and start < req_state.num_prompt:
        return req_state.num_prompt - start
    if view.config.atomic_runs:
        index = num_before(req_state.request.media, start)
        runs = req_state.request.media[index].runs if index < len(req_state.request.media) else ()
        return next((length for at, length in runs if at == start), 1)
    return 1


def whole_hits(media: Sequence[MediaItem], count: int, block_size: int) -> int:
    """Return how many of the first `count` blocks a request can share. The last shared block must not end
    inside a run.
    """
    while count:
        start = run_start(media, count * block_size)
        if start == count * block_size:
            break
        count = start // block_size
    return count
