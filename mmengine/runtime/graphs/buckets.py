"""Which steps are replayed, and in which size. Plain arithmetic over a step's plan.

A bucket is captured for each number of rows in `row_sizes`, with one token a row and, where rows have drafts,
with as many as a row with all its drafts has. A smaller step is filled up: with rows that lie in the dummy
block, and in rows with fewer drafts with tokens behind the last, which nothing reads.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.attention.base import AttentionMeta, Bucket

# Why a step is not replayed, as its metric names it.
MEDIA = "media"  # features of images or videos go into it
PROMPT = "prompt"  # a row computes more tokens than one and its drafts
REASONS = (MEDIA, PROMPT)


class Frame(NamedTuple):
    """A step in a bucket: where each of its t tokens stands there, a slice or intp [t]."""

    bucket: Bucket
    places: slice | np.ndarray


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every eighth, from 256 every sixteenth; the last is `max_rows`."""
    sizes = [size for size in (1, 2, 4) if size < max_rows]
    sizes += range(8, min(max_rows, 256), 8)
    sizes += range(256, max_rows, 16)
    return (*sizes, max_rows)


def size_for(num_rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that so many rows fit."""
    return sizes[bisect_left(sizes, num_rows)]


def all_buckets(max_rows: int, num_drafts: int) -> list[Bucket]:
    """The largest first: what a smaller one needs then fits what the largest took."""
    lengths = sorted({1, 1 + num_drafts}, reverse=True)
    return [Bucket(rows, length) for length in lengths for rows in reversed(row_sizes(max_rows))]


def frame_of(plan: StepPlan, sizes: tuple[int, ...], num_drafts: int) -> Frame | str:
    """Where `plan` is replayed, or why it is not: one of REASONS."""
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
    """`meta` in the size of the bucket. Rows beyond those of the step, and tokens beyond those of a row, are
    stored in the dummy block; the former read there what they like, the latter in a block of their row. For
    a row's own tokens see what they saw, those behind them being later ones, but multiply the rest by 0; and
    in the dummy block there may be NaN of a row that broke."""
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
    """A step without rows, filled up."""
    nothing = np.zeros(0, np.int32)
    meta = AttentionMeta(nothing, nothing, np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    return fill_up(meta, Frame(bucket, slice(0, 0)), block_size)
