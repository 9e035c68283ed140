"""Computes a prompt's M-RoPE positions (Qwen3-VL, arXiv 2511.21631), as transformers' get_rope_index does.

A position has three components: time, row and column. Each text token increases all three by 1. In an image
that begins at position `start`, the embedding of the merged patch (y, x) has the position (start, start + y,
start + x). The next token has the position start + max(height, width). A video's tokens alternate between a
timestamp, which is text, and a temporal patch, which has positions like an image.
"""

import math
from collections.abc import Sequence

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.request import MediaItem


def rope_positions(num_tokens: int, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
    """Return the positions, int32 [3, num_tokens], and the delta for output tokens (position = index +
    delta).

    `media` must be in prompt order. Raises InvalidRequest if runs of embeddings overlap, lie outside the
    prompt, or do not match their grid.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    frames = np.array([frame for item in media for frame in _frames(item)], dtype=np.int64)
    if not len(frames):
        positions[:] = np.arange(num_tokens)
        return positions, 0
    starts, lengths, heights, widths = frames.T
    ends, extents = starts + lengths, np.maximum(heights, widths)
    before = np.concatenate(([0], ends[:-1]))  # First token of the text before each frame.
    _check_places(frames, before, num_tokens)
    bases = np.cumsum(starts - before) + np.cumsum(extents) - extents
    last = bases[-1] + extents[-1] - ends[-1]
    ahead = np.append(bases - starts, last)  # Position minus index, for each text.
    positions[:] = np.arange(num_tokens) + np.repeat(ahead, np.append(ends - before, num_tokens - ends[-1]))
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    index, base = within + np.repeat(starts, lengths), np.repeat(bases, lengths)
    row, column = np.divmod(within, np.repeat(widths, lengths))
    positions[0, index], positions[1, index], positions[2, index] = base, base + row, base + column
    return positions, int(last)


def _check_places(frames: np.ndarray, before: np.ndarray, num_tokens: int) -> None:
    starts, ends = frames[:, 0], frames[:, 0] + frames[:, 1]
    wrong = np.flatnonzero((starts < before) | (ends > num_tokens))
    if len(wrong):
        raise InvalidRequest(
            f"embeddings at tokens {starts[wrong[0]]} to {ends[wrong[0]]} overlap another item's or leave "
            f"the prompt of {num_tokens} tokens"
        )


def _frames(item: MediaItem) -> list[tuple[int, int, int, int]]:
    """Return (first token, number of tokens, merged height, merged width) for each run.

    An embedding stands for merge x merge patches, so the run's length gives the merge size.
    """
    grid_t, grid_h, grid_w = item.grid
    patches = grid_h * grid_w
    merge = math.isqrt(patches // item.runs[0][1]) if item.runs and item.runs[0][1] > 0 else 0
    frames = []
    for start, length in item.runs:
        if merge < 1 or grid_h % merge or grid_w % merge or length * merge * merge != patches:
            break
        frames.append((start, length, grid_h // merge, grid_w // merge))
    if len(frames) != grid_t or len(frames) != len(item.runs):
        raise InvalidRequest(
            f"a {item.modality} of grid {item.grid} cannot have embedding runs {item.runs[:8]}: one run "
            "of height x width / merge² tokens for each temporal patch is expected"
        )
    return frames
