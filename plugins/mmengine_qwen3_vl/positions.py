"""M-RoPE positions of a prompt (Qwen3-VL, arXiv 2511.21631; the rule of transformers' get_rope_index).

Text counts up in all three rows. An embedding of an image, or of one temporal patch of a video,
stands at (start, start + y, start + x) for its merged patch (y, x); what follows counts on from
start + max(height, width). The temporal patches of a video have timestamps between them, which are
text: each is placed as if it were an image, and time itself is in the timestamps.
"""

import math
from collections.abc import Sequence

import numpy as np

from mmengine.errors import InvalidRequest
from mmengine.request import MediaItem


def rope_positions(num_tokens: int, media: Sequence[MediaItem]) -> tuple[np.ndarray, int]:
    """Positions int32 [3, num_tokens] and the delta of output tokens (position = index + delta).

    `media` stands in prompt order. Raises InvalidRequest when runs overlap, leave the prompt, or do
    not match their grid.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    index = 0  # next token to place
    position = 0  # where it stands
    for item in media:
        for start, length, height, width in _frames(item):
            if start < index or start + length > num_tokens:
                raise InvalidRequest(
                    f"a {item.modality}'s embeddings at tokens {start} to {start + length} overlap "
                    f"another's or leave the prompt of {num_tokens} tokens"
                )
            positions[:, index:start] = np.arange(position, position + start - index, dtype=np.int32)
            position += start - index
            frame = positions[:, start : start + length].reshape(3, height, width)
            frame[0] = position
            frame[1] = np.arange(position, position + height, dtype=np.int32)[:, None]
            frame[2] = np.arange(position, position + width, dtype=np.int32)
            positions[:, start : start + length] = frame.reshape(3, length)
            index = start + length
            position += max(height, width)
    positions[:, index:] = np.arange(position, position + num_tokens - index, dtype=np.int32)
    return positions, position - index


def _frames(item: MediaItem) -> list[tuple[int, int, int, int]]:
    """(first token, tokens, merged height, merged width) of each run. The merge size is what the run
    lengths say: an embedding stands for merge x merge patches."""
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
