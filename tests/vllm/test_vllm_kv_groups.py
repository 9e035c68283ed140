"""Tests logs with several KV groups, without vLLM: recorded groups, block order, and detection of wrong
decisions about sliding-window blocks.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.block_groups import BlockGroup, log_order
from mmengine.core.state.lazy_windows import LazyWindowIndex, chain_digests, settled_tokens
from mmengine.core.state.prefix_index import NO_BLOCK
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.replay.checked_log import CheckedLog
from mmengine_vllm.host_facts import not_derived
from mmengine_vllm.kv_groups import block_groups_of, split_blocks
from tests.events.logs import rewrite
from tests.vllm.fake_scheduler import FakeScheduler, FullAttentionSpec
from tests.vllm.test_vllm_recordings import RECORDINGS


def spec_of(kind="SlidingWindowSpec", **fields):
    return type(kind, (), {"block_size": 4, "sliding_window": 8, **fields})()


def scheduler_with(*specs, **attributes):
    scheduler = FakeScheduler()
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    scheduler.kv_cache_config = SimpleNamespace(num_blocks=200, kv_cache_groups=groups)
    for name, value in attributes.items():
        setattr(scheduler, name, value)
    return scheduler


FULL = spec_of("FullAttentionSpec")


@pytest.mark.parametrize(
    "specs, windows", [((FULL, spec_of()), (0, 8)), ((spec_of(), FULL, FULL), (8, 0, 0))]
)
def test_full_attention_beside_windows_is_recorded_as_block_groups(specs, windows):
    scheduler = scheduler_with(*specs)
    groups = block_groups_of(scheduler)
    assert groups == tuple(BlockGroup(window=window) for window in windows)
    assert not_derived(scheduler) == []
    assert log_order(groups)[0] == windows.index(0)


@pytest.mark.parametrize(
    "specs, attributes",
    [
        ((FULL, spec_of(block_size=8)), {}),
        ((FULL, spec_of("ChunkedLocalAttentionSpec")), {}),
        ((FULL, spec_of("MambaSpec")), {}),
        ((FULL, spec_of(sliding_window=1)), {}),
        ((FULL, spec_of(extra_retained_tokens=2)), {}),
        ((spec_of(), spec_of(sliding_window=16)), {}),
        ((FULL, spec_of()), {"num_lookahead_tokens": 1}),
        ((FULL, spec_of()), {"use_eagle": True}),
        ((FULL, spec_of()), {"max_model_len": 2000}),
    ],
)
def test_other_kv_groups_are_not_derived(specs, attributes):
    scheduler = scheduler_with(*specs, **attributes)
    assert block_groups_of(scheduler) == () and not_derived(scheduler) == ["hybrid KV groups"]


def test_a_single_kv_group_is_derived_only_with_full_attention():
    assert not_derived(scheduler_with(FullAttentionSpec())) == []
    assert not_derived(scheduler_with(spec_of())) == ["KV groups without full attention"]


def test_blocks_are_recorded_by_number_and_hits_by_group():
    """New blocks are recorded by place in the table, then by group. Prefix hits are recorded by group, then
    by place, without the zeros for blocks before a window.
    """
    tables = [0, 5, 11, 12], [1, 2, 13, 14], [0, 0, 15, 16]
    assert split_blocks(tables, 2, (1, 0, 2)) == ([1, 2, 5], [13, 11, 15, 14, 12, 16])
    assert split_blocks(tables, 2, (1,)) == ([1, 2], [13, 14])


def records_of(name):
    return list(LogReader(RECORDINGS / name))


def swapped(column, first, second):
    values = np.frombuffer(column, np.int32).copy()
    values[[first, second]] = values[[second, first]]
    return values.tobytes()


@pytest.mark.parametrize("name", ["block_groups", "asynchronous_block_groups"])
def test_exchanged_blocks_of_two_groups_are_found(tmp_path, name):
    records = records_of(name)
    at = next(at for at, each in enumerate(records) if isinstance(each.event, ev.Admitted))
    wrong = replace(records[at].event, new_blocks=swapped(records[at].event.new_blocks, 0, 1))
    changed = [*records[:at], replace(records[at], event=wrong), *records[at + 1 :]]
    found = verify(rewrite(changed, tmp_path / "log"))
    assert found.divergence.field == "tables" and found.divergence.step == records[at].step


def test_a_row_frees_blocks_before_its_windows_when_its_next_chunk_is_scheduled():
    log = CheckedLog(RECORDINGS / "block_groups")
    state, num_freed = log.first_state(), 0
    for record in log:
        if isinstance(record.event, ev.Scheduled):
            rows = state.last_rows
            if record.event.rows is not None:
                rows = np.frombuffer(record.event.rows, np.int32).astype(np.intp)
            held = state.windows.first_held[:, rows].copy()
            expected = state.windows.first_needed(settled_tokens(state, rows))
            log.apply(state, record.event)
            assert (state.windows.first_held[:, rows] == np.maximum(held, expected)).all()
            num_freed += int((state.windows.first_held[:, rows] > held).sum())
        else:
            before = state.windows.first_held.copy()
            log.apply(state, record.event)
            if isinstance(record.event, ev.Executed):
                kept = state.num_blocks > 0
                assert (state.windows.first_held[:, kept] == before[:, kept]).all()
    assert num_freed > 30


def test_a_digest_depends_on_every_earlier_block():
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4)
    digests = chain_digests(0, tokens, {})
    assert chain_digests(digests[0], tokens[1:], {}) == digests[1:]
    assert chain_digests(0, tokens[1:], {})[0] != digests[1]
    assert chain_digests(0, tokens, {0: b"image"})[2] != digests[2]
    assert max(digests) < 2**56


def test_blocks_with_equal_contents_are_found_in_the_order_of_their_recording():
    index, content = LazyWindowIndex(10, 2), np.array([7, 8])
    for blocks in ([[1, 2], [3, 0]], [[4, 5], [6, 9]]):
        index.insert(np.array(blocks), content)
    assert index.find(content).tolist() == [[1, 2], [3, 9]]
    index.forget(np.array([1, 9]))
    assert index.find(content).tolist() == [[4, 2], [3, NO_BLOCK]]
    assert index.keys[[1, 9]].tolist() == [-1, -1]
    index.insert(np.array([[1, 0], [0, 0]]), content)
    restored, blocks = LazyWindowIndex(10, 2), index.recorded()
    restored.restore(blocks, index.keys[blocks])
    for each in (index, restored):
        assert each.find(content).tolist() == [[4, 2], [3, NO_BLOCK]]
        each.forget(np.array([4]))
        assert each.find(content).tolist() == [[1, 2], [3, NO_BLOCK]]
    index.clear()
    assert (index.find(content) == NO_BLOCK).all() and (index.keys == -1).all()
