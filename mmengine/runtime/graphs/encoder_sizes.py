"""Chooses the sizes in which the encoder is captured, and the size in which a call is replayed.

A call that is smaller than its size is padded. A call above the largest size is not replayed: its launches
take less time than its computation, so a graph gains nothing (docs/explanation/decisions/gpu.md).
"""

from bisect import bisect_left
from collections.abc import Sequence

from mmengine.models.plugin import EncoderSize

MOST_EMBEDS = 512
STEP = 16  # embeddings between the smallest sizes
SEGMENT_EMBEDS = 32  # a size has one segment (frame) per 32 embeddings; unused segments cost a little time

# Reasons why a call is not replayed, as named in its metric.
PATCHES = "patches"  # more patches than in the largest size
SEGMENTS = "segments"  # more segments than in the largest size
REASONS = (PATCHES, SEGMENTS)


def embed_sizes(most: int) -> tuple[int, ...]:
    """Return 16, 32, 48, 64, then four sizes per power of two, and `most` as the last size."""
    sizes, size = [], STEP
    while size < most:
        sizes.append(size)
        size += max(STEP, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def encoder_sizes(budget: int, merge_size: int) -> list[EncoderSize]:
    """Return the sizes for up to `budget` embeddings, at most MOST_EMBEDS, in ascending order."""
    return [
        EncoderSize(embeds * merge_size**2, max(1, embeds // SEGMENT_EMBEDS))
        for embeds in embed_sizes(min(budget, MOST_EMBEDS))
    ]


def size_of(sizes: Sequence[EncoderSize], num_patches: int, num_segments: int) -> EncoderSize | str:
    """Return the smallest size that fits, or the reason from REASONS why none does."""
    place = bisect_left(sizes, num_patches, key=lambda size: size.num_patches)
    if place == len(sizes):
        return PATCHES
    place = bisect_left(sizes, num_segments, lo=place, key=lambda size: size.num_segments)
    return sizes[place] if place < len(sizes) else SEGMENTS
