"""Tests that a step's page lists (FlashInfer's format) contain each row's tokens and KV slots, in order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.config import EngineConfig
from mmengine.engine_settings import MAX_DRAFT_TOKENS
from mmengine.errors import ConfigError
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.pages import row_pages, split, whole_step
from mmengine.runtime.graphs.buckets import Frame, fill_up
from tests.native.attention_cases import spec_of

SIZE = 4


@pytest.mark.parametrize("size", [1, 2, 8, 16, 256])
def test_the_longest_rows_have_space_for_padded_drafts(size):
    # A graph's bucket pads each row to 1 + MAX_DRAFT_TOKENS tokens, which need pages even in the longest row.
    config = EngineConfig(num_draft_tokens=MAX_DRAFT_TOKENS)
    config.check()
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        EngineConfig(num_draft_tokens=MAX_DRAFT_TOKENS + 1).check()
    spec = spec_of(4, 2, 64)
    length, tokens = spec.max_model_len, 1 + MAX_DRAFT_TOKENS
    frame = Frame(Bucket(2, tokens), np.array([0, tokens]))
    blocks = -(-length // size)
    lens, table = np.full(2, length, np.int32), np.ones((2, blocks), np.int32)
    filled = fill_up(AttentionMeta(np.ones(2, np.int32), lens, np.array([7, 9]), table), frame, size)
    assert len(whole_step(filled, size).pages) <= 2 * row_pages(spec, size, 10 * blocks)
    assert len(whole_step(filled, size).pages) <= 2 * row_pages(replace(spec, max_model_len=0), size, blocks)


@st.composite
def steps(draw):
    """Return a step whose rows have random lengths and blocks.

    Unused table entries are random.
    """
    rows = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=12))
    if draw(st.booleans()):
        rows = [(before, 1 if draw(st.booleans()) else count) for before, count in rows]
    random = np.random.default_rng(draw(st.integers(0, 99)))
    lens = np.array([before + count for before, count in rows], np.int32)
    blocks = -(-lens // SIZE)
    table = random.integers(1, 500, (len(rows), int(blocks.max()) + draw(st.integers(0, 3)))).astype(np.int32)
    counts = np.array([count for _, count in rows], np.int32)
    slots = [slots_of(table[row], int(lens[row]))[-count:] for row, (_, count) in enumerate(rows)]
    return AttentionMeta(counts, lens, np.concatenate(slots).astype(np.int64), table)


def slots_of(blocks, length):
    index = np.arange(length)
    return blocks[index // SIZE].astype(np.int64) * SIZE + index % SIZE


def read(part):
    """Yield (indices of the new tokens in the step, slots of all tokens) for each row."""
    tokens = part.tokens if isinstance(part.tokens, np.ndarray) else np.arange(10**4)[part.tokens]
    assert len(tokens) == part.query_starts[-1] and len(part.pages) == part.page_starts[-1]
    for row, last in enumerate(part.last_page_len.tolist()):
        assert 1 <= last <= SIZE
        pages = part.pages[part.page_starts[row] : part.page_starts[row + 1]]
        length = (len(pages) - 1) * SIZE + last
        yield tokens[part.query_starts[row] : part.query_starts[row + 1]], slots_of(pages, length)


def expected(meta):
    ends = np.cumsum(meta.query_lens)
    for row, end in enumerate(ends.tolist()):
        places = np.arange(end - meta.query_lens[row], end)
        yield places, slots_of(meta.table[row], int(meta.kv_lens[row]))


def same(found, wanted):
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    for (places, slots), (want_places, want_slots) in zip(found, wanted):
        assert places.tolist() == want_places.tolist() and slots.tolist() == want_slots.tolist()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_the_lists_equal_the_table(meta):
    part = whole_step(meta, SIZE)
    same(read(part), expected(meta))
    assert all(column.dtype == np.int32 for column in part[1:])


@settings(max_examples=60, deadline=None)
@given(steps())
def test_a_split_step_has_each_row_once_among_its_kind(meta):
    """`split` separates rows with a single query from rows with several queries."""
    rows = list(expected(meta))
    decode, other = split(meta, SIZE)
    for part, is_kind in ((decode, meta.query_lens == 1), (other, meta.query_lens > 1)):
        assert (part is None) == (not is_kind.any())
        if part is not None:
            same(read(part), [row for row, is_it in zip(rows, is_kind) if is_it])


def test_rows_that_stand_together_are_a_slice():
    # If all rows of a kind are adjacent, `split` returns a slice of tokens instead of indices.
    table = np.arange(1, 9, dtype=np.int32).reshape(4, 2)
    lens, counts = np.array([5, 3, 8, 7], np.int32), np.array([1, 1, 4, 7], np.int32)
    meta = AttentionMeta(counts, lens, np.zeros(13, np.int64), table)
    assert [part.tokens for part in split(meta, SIZE)] == [slice(0, 2), slice(2, 13)]
