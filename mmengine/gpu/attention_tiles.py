"""Divides a step's attention among the programs of attention_kernels. The work is planned on the host.

A tile is a set of consecutive queries of one row (request), each with all heads that share a KV head.
Normally one program computes a tile over all its keys. If there are fewer tiles than programs, several
programs share a long tile (split-KV). Each program computes a part with SPAN keys, and the parts are joined
afterwards. The result has the same bits with and without split-KV.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from mmengine.ragged import counting

SPAN = 256  # keys; a multiple of the keys that a program reads in a loop iteration
WHOLE = -1  # used as a part's index if one program computes all spans of the tile
TILE_ROWS = (16, 32, 64)  # rows in a tile's matrix (queries times heads); a tensor core needs at least 16
ONE_TILE_ROWS = 32  # rows in a tile's matrix if the size must not depend on the queries


class Work(NamedTuple):
    """The plan for a step with n requests. `programs`: the number of programs per KV head.

    Tensors are on the device, in int32. `totals` and `sums` are workspaces, in float32.
    """

    rows: int  # rows in a tile's matrix: queries times heads per KV head
    width: int  # rows per tile that a part stores, at most `rows`
    programs: int
    totals: Tensor  # [parts, kv_heads, width, d]
    sums: Tensor  # [2, parts, kv_heads, width]
    counts: Tensor  # [2]: number of tiles, number of joins
    tiles: Tensor  # [i, 4]: row, first query, part or WHOLE, span
    joins: Tensor | None  # [j, 4]: row, first query, first part, end of the parts; None: no parts
    query_starts: Tensor  # [n + 1]
    befores: Tensor  # [n], number of tokens before the row's first query
    lengths: Tensor  # [n], number of tokens that the queries of the row may see
    page_starts: Tensor  # [n], where each row's blocks begin in `pages`
    pages: Tensor  # [p], the block ids of all rows


def tile_rows(group: int, longest: int | None) -> int:
    """Return the number of rows (queries times heads) in a tile's matrix.

    `group`: heads per KV head. `longest`: maximum number of queries per request.

    With `longest` None, the result depends only on `group`.
    """
    wanted = ONE_TILE_ROWS if longest is None else min(group * longest, TILE_ROWS[-1])
    return max(TILE_ROWS[0], _power_of_2(max(wanted, group)))


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def num_tiles(query_lens: np.ndarray, queries: int) -> np.ndarray:
    """Return how many tiles each request has if a tile has `queries` queries."""
    return -(-query_lens // queries)


def cut(
    query_lens: np.ndarray,
    befores: np.ndarray,
    lengths: np.ndarray,
    queries: int,
    programs: int,
    max_parts: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the `tiles` [i, 4] and `joins` [j, 4] of a Work. Tiles with the most spans come first.

    A tile is divided into parts only if there are fewer tiles than `programs`, and only while at most
    `max_parts` parts are used.
    """
    tiles = num_tiles(query_lens, queries)
    num_all = int(tiles.sum())
    rows = np.arange(len(tiles))
    if num_all == len(rows):  # as in a decode step
        first, ends = np.zeros(num_all, np.int64), np.minimum(befores + query_lens, lengths)
    else:
        rows, first = np.repeat(rows, tiles), counting(tiles) * queries
        ends = np.minimum(befores[rows] + np.minimum(first + queries, query_lens[rows]), lengths[rows])
    spans = (ends + (SPAN - 1)) // SPAN
    order = (-spans).argsort(kind="stable")
    rows, first, spans = rows[order], first[order], spans[order]
    if num_all >= programs or not num_all or spans[0] <= 1:
        return _columns(num_all, rows, first, WHOLE, 0), np.zeros((0, 4), np.int32)
    behind = spans.cumsum()
    in_parts = (spans > 1) & (behind <= max_parts)
    alone = ~in_parts
    num_joins = int(in_parts.sum())
    whole = _columns(num_all - num_joins, rows[alone], first[alone], WHOLE, 0)
    rows, first, spans, behind = rows[in_parts], first[in_parts], spans[in_parts], behind[in_parts]
    joins = _columns(num_joins, rows, first, behind - spans, behind)
    count = int(behind[-1]) if num_joins else 0
    parts = _columns(count, rows.repeat(spans), first.repeat(spans), np.arange(count), counting(spans))
    return np.concatenate((whole, parts)), joins


def _columns(count: int, *columns: np.ndarray | int) -> np.ndarray:
    table = np.empty((count, len(columns)), np.int32)
    for place, column in enumerate(columns):
        table[:, place] = column
    return table
