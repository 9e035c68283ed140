"""Decides from a step's plan whether the step is replayed from a CUDA graph, and in which size.

A bucket is a captured batch size. Each row count in `row_sizes` has a bucket with one token per row. If rows
may have drafts, the row count also has a bucket with 1 + num_drafts tokens per row. Smaller steps are padded
with rows that use only the dummy block, and with tokens after each row's last token.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.attention.base import AttentionMeta, Bucket

# Reasons why a step is not replayed. These are label values in a metric.
MEDIA = "media"  # the step uses features of images or videos
PROMPT = "prompt"  # a row computes more than 1 + num_drafts tokens
REASONS = (MEDIA, PROMPT)


class Frame(NamedTuple):
    """A step's bucket. `places`: the indices of the step's t tokens in the bucket, a slice or intp [t]."""

    bucket: Bucket
    places: slice | np.ndarray


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, multiples of 8 below 256, multiples of 16 from 256 on, and `max_rows`."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    sizes += range(8, min(max_rows, 256), 8)
    sizes += range(256, max_rows, 16)
    return (*sizes, max_rows)


def size_for(num_rows: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest size that is at least `num_rows`."""
    return sizes[bisect_left(sizes, num_rows)]


def all_buckets(max_rows: int, num_drafts: int) -> list[Bucket]:
    """Return all buckets, the largest first, so that smaller buckets can reuse the memory."""
    lengths = sorted({1, 1 + num_drafts}, reverse=True)
    return [Bucket(rows, length) for length in lengths for rows in reversed(row_sizes(max_rows))]


def frame_of(plan: StepPlan, sizes: tuple[int, ...], num_drafts: int) -> Frame | str:
    """Return the frame for a replay of `plan`, or the entry in REASONS that prevents a replay."""
    if plan.media:
        return MEDIA
    num_rows, num_tokens = len(plan.rows), len(plan.input_ids)
    rows = size_for(num_rows, sizes)
    if num_tokens == num_rows:
        return Frame(Bucket(rows, 1), slice(0, num_rows))
    length = 1 + num_drafts
    if int(plan.num_scheduled.max()) > length:
        return PROMPT
    starts = np.repeat(np.arange(num_rows) * length, plan.num_scheduled)
    return Frame(Bucket(rows, length), starts + counting(plan.num_scheduled))


def fill_up(meta: AttentionMeta, frame: Frame, block_size: int) -> AttentionMeta:
    """Return `meta` padded to the bucket's size.

    All padding tokens store their KV in the dummy block. Padding rows also read the dummy block, and padding
    tokens in a real row read the row's blocks. Padding tokens come after a row's real tokens, so real tokens
    never attend to padding. No real row may read the dummy block, which may contain NaN from a failed row.
    Masks do not help, because attention multiplies masked KV by 0, and NaN * 0 is NaN.
    """
    (num_rows, length), num_own = frame.bucket, len(meta.kv_lens)
    counts = np.full(num_rows, length, np.int32)
    slots = np.arange(num_rows * length, dtype=np.int64) % block_size
    slots[frame.places] = meta.slots
    kv_lens = counts.copy()
    np.add(meta.kv_lens, length - meta.query_lens, out=kv_lens[:num_own])
    width = -(-int(kv_lens.max()) // block_size)
    table = np.zeros((num_rows, width), np.int32)
    table[:num_own] = meta.table[:, :1]
    own = meta.table[:, :width]
    is_own = np.arange(own.shape[1]) < -(-meta.kv_lens // block_size)[:, None]
    np.copyto(table[:num_own, : own.shape[1]], own, where=is_own)
    return AttentionMeta(counts, kv_lens, slots, table)


def empty_step(bucket: Bucket, block_size: int) -> AttentionMeta:
    """Return the metadata for a step that consists only of padding."""
    nothing = np.zeros(0, np.int32)
    meta = AttentionMeta(nothing, nothing, np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    return fill_up(meta, Frame(bucket, slice(0, 0)), block_size)
