"""Chooses the sizes in which the encoder is captured, and the size in which a call is replayed.

A call is padded to the next larger size. A call above the largest size is not replayed: its computation takes
longer than its launches, so a graph would gain nothing (docs/explanation/decisions/gpu.md).
"""

from bisect import bisect_left
from collections.abc import Sequence

from mmengine.models.plugin import EncoderSize

MOST_EMBEDS = 512
STEP = 16  # distance between the smallest sizes, in embeddings
SEGMENT_EMBEDS = 32  # a size has a segment (frame) for each 32 embeddings; unused segments cost little time

# Reasons why a call is not replayed. These are label values in a metric.
PATCHES = "patches"  # more patches than in the largest size
SEGMENTS = "segments"  # more segments than in the largest size
REASONS = (PATCHES, SEGMENTS)


def embed_sizes(most: int) -> tuple[int, ...]:
    """Return 16, 32, 48, 64, then four evenly spaced sizes for each doubling, and `most` as the last size."""
    sizes, size = [], STEP
    while size < most:
        sizes.append(size)
        size += max(STEP, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def encoder_sizes(budget: int, merge_size: int) -> list[EncoderSize]:
    """Return the sizes for at most `budget` embeddings, and at most MOST_EMBEDS, in ascending order."""
    return [
        EncoderSize(embeds * merge_size**2, max(1, embeds // SEGMENT_EMBEDS))
        for embeds in embed_sizes(min(budget, MOST_EMBEDS))
    ]


def size_of(sizes: Sequence[EncoderSize], num_patches: int, num_segments: int) -> EncoderSize | str:
    """Return the smallest size that fits, or the reason from REASONS why no size fits."""
    place = bisect_left(sizes, num_patches, key=lambda size: size.num_patches)
    if place == len(sizes):
        return PATCHES
    place = bisect_left(sizes, num_segments, lo=place, key=lambda size: size.num_segments)
    return sizes[place] if place < len(sizes) else SEGMENTS
