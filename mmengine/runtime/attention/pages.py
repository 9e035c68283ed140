"""Converts a step's block tables to FlashInfer's format: a list with the blocks (pages) of all rows.

Row i has the queries query_starts[i] to query_starts[i + 1] - 1, and the list's pages at the indices
page_starts[i] to page_starts[i + 1] - 1. The row's last page has last_page_len[i] tokens, and the row's other
pages are full.
"""

from typing import NamedTuple

import numpy as np

from mmengine.engine_settings import MAX_DRAFT_TOKENS
from mmengine.models.plugin import ModelSpec
from mmengine.ragged import counting
from mmengine.runtime.attention.base import AttentionMeta

Places = slice | np.ndarray


class Part(NamedTuple):
    """n rows whose attention a single call computes. All arrays are on the host, all but `tokens` int32."""

    tokens: Places  # the rows' tokens in the step: a slice, or intp indices
    query_starts: np.ndarray  # [n + 1]
    page_starts: np.ndarray  # [n + 1]
    pages: np.ndarray  # [page_starts[-1]]
    last_page_len: np.ndarray  # [n], 1 to block_size


def whole_step(meta: AttentionMeta, block_size: int) -> Part:
    """Return a Part with all rows in the step."""
    return Part(slice(0, len(meta.slots)), *_lists(meta.query_lens, meta.kv_lens, meta.table, block_size))


def split(meta: AttentionMeta, block_size: int) -> tuple[Part | None, Part | None]:
    """Return a Part with the decode rows (one query) and a Part with the prompt rows. An empty Part is None.

    FlashInfer has a decode kernel and a prompt kernel. The prompt kernel is slow for a single query.
    """
    is_decode = meta.query_lens == 1
    num_decode = int(np.count_nonzero(is_decode))
    if num_decode == len(is_decode):
        return whole_step(meta, block_size), None
    if not num_decode:
        return None, whole_step(meta, block_size)
    starts = np.cumsum(meta.query_lens) - meta.query_lens
    decode, other = (_part(meta, rows.nonzero()[0], starts, block_size) for rows in (is_decode, ~is_decode))
    return decode, other


def row_pages(spec: ModelSpec, block_size: int, num_blocks: int) -> int:
    """Return the maximum number of pages for a row.

    A row needs pages for the longest request that the model and a pool with `num_blocks` blocks allow, and
    for drafts.
    """
    longest = -(-spec.max_model_len // block_size) or num_blocks
    return min(longest, num_blocks) + -(-MAX_DRAFT_TOKENS // block_size)


def _part(meta: AttentionMeta, rows: np.ndarray, starts: np.ndarray, block_size: int) -> Part:
    """Return a Part with these rows (ascending). `starts` [n]: the index of each row's first token."""
    counts = meta.query_lens[rows]
    if rows[-1] - rows[0] + 1 == len(rows):
        tokens: Places = slice(int(starts[rows[0]]), int(starts[rows[-1]] + counts[-1]))
    else:
        tokens = np.repeat(starts[rows], counts) + counting(counts)
    return Part(tokens, *_lists(counts, meta.kv_lens[rows], meta.table[rows], block_size))


def _lists(
    query_lens: np.ndarray, kv_lens: np.ndarray, table: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return query_starts, page_starts, pages and last_page_len. Each row must have at least one token."""
    num_pages = -(-kv_lens // block_size)
    own = np.arange(table.shape[1]) < num_pages[:, None]
    return (
        _starts(query_lens),
        _starts(num_pages),
        table[own].astype(np.int32, copy=False),
        (kv_lens - (num_pages - 1) * block_size).astype(np.int32),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the cumulative sums of `lengths` from 0, int32 [n + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
