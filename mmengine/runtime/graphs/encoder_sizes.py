"""In which sizes the encoder is captured, and which one a call is replayed in. Plain arithmetic.

A call that is smaller than its size is filled up. Beyond the largest, launching takes less time than
computing, so nothing is gained (docs/explanation/decisions/gpu.md).
"""

from bisect import bisect_left
from collections.abc import Sequence

from mmengine.models.plugin import EncoderSize

MOST_EMBEDS = 512
STEP = 16  # embeddings between the smallest sizes
SEGMENT_EMBEDS = 32  # a size has room for a segment for each so many; each costs a little, used or not

# Why a call is not replayed, as its metric names it.
PATCHES = "patches"  # more of them than the largest size has
SEGMENTS = "segments"  # likewise
REASONS = (PATCHES, SEGMENTS)


def embed_sizes(most: int) -> tuple[int, ...]:
    """16, 32, 48, 64, then every fourth of a power of two, up to `most`, the last."""
    sizes, size = [], STEP
    while size < most:
        sizes.append(size)
        size += max(STEP, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def encoder_sizes(budget: int, merge_size: int) -> list[EncoderSize]:
    """The smallest first, none beyond `budget` embeddings."""
    return [
        EncoderSize(embeds * merge_size**2, max(1, embeds // SEGMENT_EMBEDS))
        for embeds in embed_sizes(min(budget, MOST_EMBEDS))
    ]


def size_of(sizes: Sequence[EncoderSize], num_patches: int, num_segments: int) -> EncoderSize | str:
    """The smallest that holds so much, or which of REASONS there is that none does."""
    place = bisect_left(sizes, num_patches, key=lambda size: size.num_patches)
    if place == len(sizes):
        return PATCHES
    place = bisect_left(sizes, num_segments, lo=place, key=lambda size: size.num_segments)
    return sizes[place] if place < len(sizes) else SEGMENTS
