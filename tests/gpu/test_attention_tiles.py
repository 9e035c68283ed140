"""Tests that the tiles cover every query and every span of KV once, and that long rows are split if GPU
programs are idle.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmengine.gpu.attention_tiles import SPAN, WHOLE, cut, tile_rows

ROWS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5 * SPAN)), min_size=1, max_size=9)


@given(ROWS, st.sampled_from([1, 4, 16, 64]), st.integers(1, 60), st.integers(0, 40))
def test_every_query_and_every_span_once(rows, queries, programs, max_parts):
    counts, befores = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    lengths = counts + befores
    tiles, joins = cut(counts, befores, lengths, queries, programs, max_parts)
    seen = {}
    for row, query, part, span in tiles.tolist():
        assert query % queries == 0 and 0 <= query < counts[row]
        seen.setdefault((row, query), []).append((part, span))
    assert len(seen) == sum(-(-count // queries) for count in counts)
    joined = {(row, query): (first, end) for row, query, first, end in joins.tolist()}
    for (row, query), parts in seen.items():
        end = befores[row] + min(query + queries, counts[row])
        if (row, query) in joined:
            first, behind = joined.pop((row, query))
            assert behind - first == -(-end // SPAN) > 1
            assert parts == [(first + span, span) for span in range(behind - first)]
        else:
            assert parts == [(WHOLE, 0)]
    assert not joined
    taken = sorted(part for part in tiles[:, 2].tolist() if part != WHOLE)
    assert taken == sorted(set(taken)) and all(part < max_parts for part in taken)
    assert not taken or len(seen) < programs


def test_long_rows_are_cut_before_short_ones():
    ones = np.ones(3, np.int32)
    lengths = np.array([2, 9, 4], np.int32) * SPAN
    tiles, joins = cut(ones, lengths - 1, lengths, 16, 100, 13)
    assert joins.tolist() == [[1, 0, 0, 9], [2, 0, 9, 13]]
    assert tiles[0].tolist() == [0, 0, WHOLE, 0] and len(tiles) == 14
    assert not len(cut(ones, lengths - 1, lengths, 16, 3, 13)[1]), "as many tiles as programs"


def test_a_row_that_sees_nothing_is_a_tile_all_the_same():
    none, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    assert cut(one, none, none, 16, 5, 5)[0].tolist() == [[0, 0, WHOLE, 0]]


@pytest.mark.parametrize(
    "group, longest, rows",
    [
        (1, 1, 16),
        (4, 1, 16),
        (4, 5, 32),
        (4, 17, 64),
        (2, 999, 64),
        (71, 1, 128),
        (4, None, 32),
        (40, None, 64),
    ],
)
def test_a_tile_holds_a_query_with_all_its_heads(group, longest, rows):
    """`group`: heads per KV head. `longest`: maximum number of queries per request."""
    assert tile_rows(group, longest) == rows
