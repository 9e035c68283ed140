"""Tests the search for prefix hits in a model with sliding-window layers against a brute-force loop."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from small_engine import request, settings_of

from mmengine.block_groups import BlockGroup
from mmengine.core.decide.window_hits import window_hits
from mmengine.core.state.blocks import BlockPool
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.core.state.window_blocks import WindowTables

SIZE = 4
# Missing blocks: all blocks from an index on ("end"), all blocks before an index ("start"), or random blocks
# ("few", "many").
MISSING = st.sampled_from(["few", "many", "end", "start"])


def view_of(windows, count, missing, rng):
    """Return a view of a pool with `count` hits. Some hits lack their block in a group with a window."""
    groups = (BlockGroup(0, (0,)), *(BlockGroup(window, (n,)) for n, window in enumerate(windows, 1)))
    pool = BlockPool(1 + count * len(groups), SIZE, SIZE, len(windows))
    config = settings_of(
        block_groups=groups, num_blocks=pool.num_blocks, max_model_len=(count + 1) * SIZE, block_size=SIZE
    )
    hits = np.arange(1, count + 1, dtype=np.int32)
    pool.index.insert_chain(hits, 0, rng.integers(0, 9, (count, SIZE), np.int32), {})
    blocks = np.arange(1 + count, pool.num_blocks, dtype=np.int32).reshape(len(windows), count)
    numbers, at = np.arange(count), rng.integers(0, count + 1, (len(windows), 1))
    is_missing = {
        "few": rng.random(blocks.shape) < 0.1,
        "many": rng.random(blocks.shape) < 0.6,
        "end": numbers >= at,
        "start": numbers < at,
    }[missing]
    pool.windows.insert(np.where(is_missing, 0, blocks).astype(np.int32), np.asarray(pool.content[hits]))
    view = SimpleNamespace(
        blocks=pool, windows=WindowTables(config, count + 1), config=config, block_size=SIZE
    )
    return view, hits


def longest_hits(view, windows, hits):
    """Return the hits for the longest prefix whose windows are all cached, by brute force."""
    blocks = view.blocks.find_windows(np.asarray(view.blocks.content[hits])).tolist()
    for count in range(len(hits), 0, -1):
        first = [max(0, count * SIZE - window + 1) // SIZE for window in windows]
        needed = [block for row, start in zip(blocks, first, strict=True) for block in row[start:count]]
        if NO_BLOCK not in needed:
            return [*hits[:count].tolist(), *needed], count * SIZE
    return [], 0


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(0, 60), MISSING, st.integers(0, 2**32)
)
def test_hits_are_the_longest_prefix_whose_windows_are_cached(windows, count, missing, seed):
    view, hits = view_of(windows, count, missing, np.random.default_rng(seed))
    found, num_computed = window_hits(view, SimpleNamespace(request=request("one", 4)), hits)
    assert (found.tolist(), num_computed) == longest_hits(view, windows, hits)
    assert found.dtype == np.int32


def test_the_search_reads_each_block_a_few_times():
    reads = []
    view, hits = view_of([SIZE], 5_000, "start", np.random.default_rng(0))
    find, view.blocks.find_windows = (
        view.blocks.find_windows,
        lambda contents: reads.append(len(contents)) or find(contents),
    )
    view.blocks.windows.clear()
    assert window_hits(view, None, hits)[1] == 0
    assert sum(reads) < 3 * len(hits) and len(reads) < 20
