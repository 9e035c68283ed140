"""Keeps chunks and prefix hits from splitting what a model computes in one step: an embedding run
(`atomic_runs`), or the whole prompt (`whole_prompt`).

In some models the tokens of an image attend to one another in both directions. Their KV depends on all of
them, so one step must compute the whole run.
"""

from collections.abc import Sequence

from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.request import MediaItem, num_before, run_start


def whole_chunk(view: View, req_state: RequestView, start: int, length: int) -> int:
    """Return the largest chunk of at most `length` tokens from `start` on that the model's rules allow.

    0: the step has too few tokens left for the next run or the prompt.
    """
    if view.config.whole_prompt and start + length < req_state.num_prompt:
        return 0
    if view.config.atomic_runs:
        return run_start(req_state.request.media, start + length) - start
    return length


def least_chunk(view: View, req_state: RequestView, start: int) -> int:
    """Return how many tokens the request's next chunk has at least."""
    if view.config.whole_prompt and start < req_state.num_prompt:
        return req_state.num_prompt - start
    if view.config.atomic_runs:
        index = num_before(req_state.request.media, start)
        runs = req_state.request.media[index].runs if index < len(req_state.request.media) else ()
        return next((length for at, length in runs if at == start), 1)
    return 1


def whole_hits(media: Sequence[MediaItem], count: int, block_size: int) -> int:
    """Return how many of the first `count` blocks a request can share: the last one must not end inside a
    run.
    """
    while count:
        start = run_start(media, count * block_size)
        if start == count * block_size:
            break
        count = start // block_size
    return count
