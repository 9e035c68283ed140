"""Tests the division of layers into block groups, and attention with a block table per group."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from mmengine.block_groups import BlockGroup
from mmengine.core.executor import WindowPlan
from mmengine.errors import ConfigError
from mmengine.models.layer_groups import block_groups, block_spec, group_spec, groups_unfit
from mmengine.models.spec import LayerAttention, ModelSpec
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.grouped import GroupedAttention
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool

HEADS, KV_HEADS, WIDTH, SIZE = 4, 2, 16, 4


def spec_of(*layers):
    return ModelSpec(
        *(len(layers), HEADS, KV_HEADS, WIDTH, HEADS * WIDTH, 64, 4096, 0, 8), attention=tuple(layers)
    )


def spec_with(windows):
    """Return a spec with one layer for each entry in `windows` (0: no window)."""
    return spec_of(*(LayerAttention(n, window=window) for n, window in enumerate(windows)))


def groups_of(windows, longest=4096):
    return [(group.window, group.layers) for group in block_groups(spec_with(windows), longest)]


def test_layers_with_one_window_are_cut_into_groups_of_the_full_layers_number():
    # A group has as many layers as there are layers without a window; the last group may have fewer.
    assert groups_of([7, 0, 7, 0]) == [(0, (1, 3)), (7, (0, 2))]
    assert groups_of([7, 7, 0, 7, 7, 0]) == [(0, (2, 5)), (7, (0, 1)), (7, (3, 4))]
    assert groups_of([9, 7, 0]) == [(0, (2,)), (7, (1,)), (9, (0,))]
    # Gemma 3 1B: 22 layers with a window and 4 without
    gemma = groups_of([0 if n % 6 == 5 else 512 for n in range(26)])
    assert [len(layers) for _, layers in gemma] == [4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    "windows, longest",
    [
        ([0, 0, 0], 4096),  # no window
        ([1, 1], 4096),  # a window that does not reach into the previous block
        ([7, 0, 7, 0], 7),  # no request is longer than the window
        ([7, 0, 0, 0, 0], 4096),  # the window's blocks would be mostly empty
    ],
)
def test_groups_that_save_nothing_are_not_made(windows, longest):
    assert groups_of(windows, longest) == []


def test_windows_in_all_layers_are_one_group_with_the_longest_window():
    assert groups_of([7, 7, 7]) == [(7, (0, 1, 2))]
    assert groups_of([7, 9, 7]) == [(9, (0, 1, 2))]


def test_layers_belong_to_the_group_whose_kv_they_read():
    spec = spec_of(
        LayerAttention(0, window=7), LayerAttention(1), LayerAttention(0, window=5), LayerAttention(1)
    )
    groups = block_groups(spec, 4096)
    assert groups == (BlockGroup(0, (1,)), BlockGroup(7, (0,)))
    own, members = group_spec(spec, groups[1])
    assert members == [0, 2]
    assert own.attention == (LayerAttention(0, window=7), LayerAttention(0, window=5))
    assert own.num_kv_layers == 1 and own.problem() is None
    # A layer without a window needs all keys, also if it reads the KV of a layer with a window.
    mixed = spec_of(LayerAttention(0, window=7), LayerAttention(1), LayerAttention(0))
    assert block_groups(mixed, 4096) == ()


def test_chunks_count_as_windows():
    spec = spec_of(LayerAttention(0, chunk=8), LayerAttention(1), LayerAttention(2, window=3, chunk=8))
    assert [group.window for group in block_groups(spec, 4096)] == [0, 3, 8]


def test_groups_of_another_model_are_refused():
    spec = spec_with([7, 0])
    pool = KVPool(block_spec(spec, block_groups(spec, 4096)), 8, SIZE, torch.float32, open_device("cpu"))
    for groups in ((BlockGroup(0, (1,)), BlockGroup(6, (0,))), (BlockGroup(0, (0,)), BlockGroup(9, (2,)))):
        assert groups_unfit(spec, groups)
        with pytest.raises(ConfigError, match="do not describe this model"):
            make_backend("auto", spec, pool, groups=groups)
    assert groups_unfit(spec, block_groups(spec, 4096)) is None


LAYERS = (
    LayerAttention(0, window=7),
    LayerAttention(1, softcap=2.0),
    LayerAttention(2, window=7, has_sinks=True),
    LayerAttention(3),
    LayerAttention(4, window=5),
    LayerAttention(3),
    LayerAttention(0, window=7),
)
SINKS = torch.linspace(-1, 2, HEADS)
STEPS = (((0, 13), (1, 5)), ((0, 1), (1, 9), (2, 1)), ((0, 1), (1, 1), (2, 12)), ((0, 6), (1, 1), (2, 1)))


class Tables:
    """The rows' block tables for each group. All groups share a pool, and free the blocks before their
    window.
    """

    def __init__(self, groups, num_blocks, pool):
        self.groups, self.pool = groups, pool
        self.free = np.random.default_rng(1).permutation(np.arange(1, num_blocks)).tolist()
        self.tables = np.zeros((len(groups), 3, 16), np.int32)
        self.lengths = np.zeros(3, np.int32)

    def meta(self, step):
        """Return the step's metadata, after filling freed blocks with NaN."""
        rows, counts = (np.array(each, np.int32) for each in zip(*step, strict=True))
        for group, table in zip(self.groups, self.tables, strict=True):
            for row, count in step:
                length = int(self.lengths[row])
                first = max(0, length - group.window + 1) // SIZE if group.window else 0
                for number in np.flatnonzero(table[row, :first]).tolist():
                    self.free.append(int(table[row, number]))
                    self.pool.blocks[:, self.free[-1]] = float("nan")
                    table[row, number] = 0
                for number in range(-(-length // SIZE), -(-(length + count) // SIZE)):
                    table[row, number] = self.free.pop(0)
                    self.pool.clear(torch.tensor(table[row, number : number + 1].astype(np.int64)))
        owners = np.repeat(rows, counts)
        positions = np.concatenate([self.lengths[row] + np.arange(count) for row, count in step])
        self.lengths[rows] += counts
        slots = [
            table[owners, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
            for table in self.tables
        ]
        windows = tuple(WindowPlan(own, table[rows]) for own, table in zip(slots[1:], self.tables[1:]))
        kv_lens = self.lengths[rows].copy()
        return AttentionMeta(counts, kv_lens, slots[0], self.tables[0][rows], windows=windows)


def test_groups_attend_like_one_table_although_windows_free_their_blocks():
    spec = spec_of(*LAYERS)
    groups = block_groups(spec, 4096)
    assert [group.window for group in groups] == [0, 5, 7]
    pool = KVPool(block_spec(spec, groups), 40, SIZE, torch.float32, open_device("cpu"))
    whole = KVPool(spec, 40, SIZE, torch.float32, open_device("cpu"))
    grouped, single = make_backend("auto", spec, pool, groups=groups), make_backend("auto", spec, whole)
    assert isinstance(grouped, GroupedAttention)
    assert pool.blocks.shape[0] == 2 and whole.blocks.shape[0] == 5
    tables, one = Tables(groups, 40, pool), Tables(groups[:1], 40, whole)
    random = torch.Generator().manual_seed(2)
    for step in STEPS:
        total = sum(count for _, count in step)
        grouped.begin(tables.meta(step))
        single.begin(one.meta(step))
        for number, layer in enumerate(LAYERS):
            q = torch.randn(total, HEADS, WIDTH, generator=random)
            k, v = (torch.randn(total, KV_HEADS, WIDTH, generator=random) for _ in range(2))
            if layer.kv_layer == number:
                grouped.append(number, k, v)
                single.append(number, k, v)
            sinks = (SINKS,) if layer.has_sinks else ()
            found, wanted = grouped.run(number, q, *sinks), single.run(number, q, *sinks)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_missing_group_in_a_plan_is_an_error():
    spec = spec_with([7, 0])
    groups = block_groups(spec, 4096)
    pool = KVPool(block_spec(spec, groups), 8, SIZE, torch.float32, open_device("cpu"))
    meta = Tables(groups, 8, pool).meta(((0, 3),))
    with pytest.raises(ValueError, match="zip"):
        make_backend("auto", spec, pool, groups=groups).begin(msgspec.structs.replace(meta, windows=()))


def test_a_plain_group_has_the_fast_backend():
    own, _ = group_spec(spec_with([7, 0, 0, 7]), BlockGroup(0, (1, 2)))
    assert own == replace(own, attention=()) and own.num_kv_layers == 2
