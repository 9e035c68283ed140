"""Chooses the sizes for which the encoder's CUDA graphs are captured, and the graph for an encoder call.

A call is padded to the next larger size. Calls above the largest size run without a graph, because their
kernels take longer than the launches (docs/explanation/decisions/gpu.md).
"""

from bisect import bisect_left
from collections.abc import Sequence

from mmengine.models.plugin import EncoderSize

MOST_EMBEDS = 512
STEP = 16  # distance between the smallest sizes, in embeddings
SEGMENT_EMBEDS = 32  # each size allows one segment (frame) per 32 embeddings

# Reasons why a call runs without a graph. They are label values in a metric.
PATCHES = "patches"  # more patches than in the largest size
SEGMENTS = "segments"  # more segments than in the largest size
REASONS = (PATCHES, SEGMENTS)


def embed_sizes(most: int) -> tuple[int, ...]:
    """Return 16, 32, 48, 64, then four sizes per doubling, up to `most`, which is the last size."""
    sizes, size = [], STEP
    while size < most:
        sizes.append(size)
        size += max(STEP, (1 << size.bit_length() - 1) // 4)
    return (*sizes, most)


def encoder_sizes(budget: int, merge_size: int) -> list[EncoderSize]:
    """Return the sizes up to `budget` or MOST_EMBEDS embeddings, ascending."""
    return [
        EncoderSize(embeds * merge_size**2, max(1, embeds // SEGMENT_EMBEDS))
        for embeds in embed_sizes(min(budget, MOST_EMBEDS))
    ]


def size_of(sizes: Sequence[EncoderSize], num_patches: int, num_segments: int) -> EncoderSize | str:
    """Return the smallest size that fits, or the reason (PATCHES or SEGMENTS) why none fits."""
    place = bisect_left(sizes, num_patches, key=lambda size: size.num_patches)
    if place == len(sizes):
        return PATCHES
    place = bisect_left(sizes, num_segments, lo=place, key=lambda size: size.num_segments)
    return sizes[place] if place < len(sizes) else SEGMENTS
