"""Compares the CPU kernels' windows, chunks, soft caps, sinks, scales and value sizes with torch's attention,
for each instruction set that this CPU has. Rows are long enough to cross spans of 64 and blocks of 512 keys.
"""

import numpy as np
import pytest
import torch
from attention_cases import dense

from mmengine.models.plugin import LayerAttention, ModelSpec
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.masked_paged import MaskedPagedAttention
from mmengine.runtime.attention.native_paged import LayerRules, NativePagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.kv.pool import KVPool
from tests.instruction_sets import isas, opened

SIZE, NUM_BLOCKS = 16, 90
LAYERS = {
    "plain": LayerAttention(0),
    "window": LayerAttention(0, window=70),
    "window of one key": LayerAttention(0, window=1),
    "long window": LayerAttention(0, window=600),
    "chunks": LayerAttention(0, chunk=100),
    "soft cap": LayerAttention(0, softcap=3.0),
    "sinks": LayerAttention(0, has_sinks=True),
    "everything": LayerAttention(0, window=90, chunk=160, softcap=5.0, scale=0.1, has_sinks=True),
    "smaller values": LayerAttention(0, window=200, value_dim=24),
}
SHAPES = {"grouped": (6, 2, 40), "one head": (3, 1, 64), "wide": (2, 2, 264)}
# (number of tokens in the step, row's length after the step): decode rows and chunks, some beyond 512 keys
ROWS = ((1, 700), (1, 65), (150, 720), (7, 1040), (33, 33), (1, 1100))
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # larger for bfloat16: the reference uses float32


@pytest.fixture(scope="module", params=isas())
def library(request):
    return opened(request.param)


class Case:
    """A pool with random KV, rows in shuffled blocks, and their queries."""

    def __init__(self, layer, shape, dtype, rows=ROWS, seed=4):
        heads, kv_heads, size = SHAPES[shape]
        self.layer, self.rows, self.dtype = layer, rows, dtype
        self.spec = ModelSpec(1, heads, kv_heads, size, heads * size, 64, 4096, 0, 8, attention=(layer,))
        self.pool = KVPool(self.spec, NUM_BLOCKS, SIZE, dtype, CpuDevice())
        random = torch.Generator().manual_seed(seed)
        self.pool.blocks.normal_(generator=random)
        self.pool.blocks[:, 0] = 0  # the dummy block
        if layer.value_dim:
            self.pool.blocks[:, :, 1, ..., layer.value_dim :] = 0
        self.table = np.random.default_rng(seed).permuted(
            np.tile(np.arange(1, NUM_BLOCKS, dtype=np.int32), (len(rows), 1)), axis=1
        )
        self.q = torch.randn(sum(count for count, _ in rows), heads, size, generator=random).to(dtype)
        self.sinks = torch.linspace(-1, 3, heads) if layer.has_sinks else None

    def meta(self, drafts=None, rows=None):
        counts, lens = (np.array(each, np.int32) for each in zip(*(rows or self.rows), strict=True))
        table = self.table[: len(counts)]
        return AttentionMeta(counts, lens, np.zeros(counts.sum(), np.int64), table, drafts)

    def native(self, library, q=None, **options):
        backend = NativePagedAttention(self.spec, self.pool, library)
        backend.begin(self.meta(**options))
        return backend.run_layer(0, self.q if q is None else q, LayerRules.of(self.layer), self.sinks)

    def torch(self):
        pool = KVPool(self.spec, NUM_BLOCKS, SIZE, torch.float32, CpuDevice())
        pool.blocks.copy_(self.pool.blocks)
        backend = MaskedPagedAttention(self.spec, pool, self.spec.attention)
        backend.begin(self.meta())
        return backend.run(0, self.q.float(), self.sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_kernels_compute_what_torch_computes(library, name, shape, dtype):
    case = Case(LAYERS[name], shape, dtype)
    found = case.native(library).float()
    torch.testing.assert_close(found, case.torch(), rtol=0, atol=LIMIT[dtype])


def test_the_reference_itself_is_dense_attention():
    case = Case(LAYERS["plain"], "grouped", torch.float32, rows=((5, 600),))
    k, v = case.pool.layers[0][case.table[0]].unbind(1)
    k, v = (each.flatten(0, 1)[:600] for each in (k, v))
    torch.testing.assert_close(case.torch(), dense(case.q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["window", "chunks", "everything"])
def test_keys_that_no_query_sees_are_not_read(library, name, dtype):
    layer = LAYERS[name]
    for count, length in ROWS:
        case = Case(layer, "grouped", dtype, rows=((count, length),))
        wanted, position = case.native(library), length - count
        first = max(0, position - layer.window + 1 if layer.window else 0)
        first = max(first, position // layer.chunk * layer.chunk if layer.chunk else 0)
        hidden = np.concatenate((np.arange(first), np.arange(length, (NUM_BLOCKS - 1) * SIZE)))
        case.pool.layers[0][case.table[0][hidden // SIZE], :, hidden % SIZE] = float("nan")
        assert torch.equal(case.native(library), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["window", "window of one key", "everything"])
@pytest.mark.parametrize("length", [64, 80, 700])
def test_drafts_have_the_bits_of_single_tokens(library, name, length, dtype):
    """The row's first span of keys may lie before a later draft's window."""
    case = Case(LAYERS[name], "grouped", dtype, rows=((16, length),))
    verified = case.native(library, drafts=np.array([15], np.int32))
    for i in range(16):
        alone = case.native(library, q=case.q[i : i + 1], rows=((1, length - 15 + i),))
        assert torch.equal(verified[i : i + 1], alone)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_depend_neither_on_threads_nor_on_the_step(library, name):
    case = Case(LAYERS[name], "grouped", torch.float32)
    together, threads = case.native(library).split([count for count, _ in ROWS]), torch.get_num_threads()
    queries, whole = case.q.split([count for count, _ in ROWS]), case.table
    for number, row in enumerate(ROWS):
        case.table = whole[number : number + 1]
        for count in (1, 2):
            torch.set_num_threads(count)
            try:
                alone = case.native(library, q=queries[number], rows=(row,))
            finally:
                torch.set_num_threads(threads)
            assert torch.equal(alone, together[number])
