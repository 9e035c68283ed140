"""Tests attention backends against dense attention: torch, Triton in its interpreter, and the CPU kernels for
each instruction set that this CPU has.
"""

from functools import partial

import numpy as np
import pytest
import torch
from attention_cases import TOLERANCE, Rows, dense, spec_of

from mmengine.errors import ConfigError
from mmengine.native.library import load
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.attention.native_paged import NativePagedAttention
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.attention.triton_paged import TritonPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.kv.pool import KVPool
from tests.instruction_sets import isas, opened

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Heads, KV heads, head size, block size. Head sizes have different remainders modulo 16 and 32. Groups of 1
# to 8 heads share a KV head.
SHAPES = [
    (4, 2, 32, 4),
    (4, 4, 16, 8),
    (8, 1, 64, 16),
    (6, 2, 24, 16),
    (5, 1, 72, 32),
    (2, 2, 80, 8),
    (4, 2, 128, 16),
    (7, 1, 256, 128),
]


def native(isa):
    """Return a function that makes backends with the kernels for an instruction set."""
    return partial(NativePagedAttention, library=opened(isa))


@pytest.fixture(scope="module", params=["torch", "triton", *isas()])
def backend(request):
    if request.param == "triton":
        if request.getfixturevalue("kernel_device").type != "cpu":
            pytest.skip("this test uses a KV pool on the CPU; tests/gpu has tests on the GPU")
        return interpreted
    return TorchPagedAttention if request.param == "torch" else native(request.param)


def interpreted(spec, kv):
    """Return a backend whose Triton kernels run in Triton's interpreter, which is slow but needs no GPU."""
    if kv.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    return TritonPagedAttention(spec, kv)


@pytest.fixture(scope="module", params=isas())
def kernels(request):
    return native(request.param)


@BOTH
@pytest.mark.parametrize("heads, kv_heads, head_dim, block_size", SHAPES)
def test_random_ragged_batches(backend, dtype, heads, kv_heads, head_dim, block_size):
    if backend is interpreted:
        pytest.skip("too slow in an interpreter; tests/gpu has shorter ones")
    random = np.random.default_rng(head_dim)
    spec = spec_of(heads, kv_heads, head_dim, layers=1)
    rows = Rows(backend, spec, dtype, block_size, num_blocks=2 + 8 * (700 // block_size + 1))
    names = [f"r{i}" for i in range(7)]
    # In the next steps, `long` reads more than one block of 512 keys, and `r0` reaches the end of a span of
    # 64 tokens.
    rows.step(("long", 530), ("r0", 61))
    for _ in range(8):
        some = random.permutation(names)[: random.integers(1, 8)]
        rows.step(*[(str(name), int(random.choice([1, 1, 2, 7, 13, 40]))) for name in ["long", *some]])


def test_decode_rows_of_very_different_lengths(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("long", 97), ("short", 1), ("middle", 8))
    for _ in range(9):
        rows.step(("short", 1), ("long", 1), ("middle", 1))


def test_chunks_of_a_prompt_end_anywhere(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    for count in (3, 1, 4, 8, 2, 1, 9):
        rows.step(("a", count), ("b", 1))


def test_equal_chunks_at_equal_and_other_offsets(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("a", 5), ("b", 5), ("c", 9))
    rows.step(("a", 6), ("c", 6), ("b", 6))
    rows.step(("d", 6), ("a", 6), ("e", 6))


def test_a_prefix_filled_in_the_same_step(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("first", 8))
    # In the same step, `first` fills its third block, and `second` reads the first two blocks of `first`.
    rows.share("second", "first", 8)
    rows.step(("second", 5), ("first", 4))
    rows.share("third", "first", 12)
    rows.step(("third", 1), ("first", 1), ("second", 1))


def test_blocks_written_by_another_row_of_the_step_are_read(backend):
    """Another row may compute a row's cached prefix in the same step, because all k and v are stored before
    attention runs.
    """
    spec, size = spec_of(2, 1, 8, layers=1), 4
    pool = KVPool(spec, 8, size, torch.float32, CpuDevice())
    attention = backend(spec, pool)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 5, 1, 8, generator=generator)
    q = torch.randn(5, 2, 8, generator=generator)
    # Row 0 computes its token 4, which follows block 3. Row 1 computes the tokens of block 3 in the same
    # step.
    table = np.array([[3, 5], [3, 0]], np.int32)
    lens = np.array([5, 4], np.int32)
    attention.begin(AttentionMeta(np.array([1, 4], np.int32), lens, np.array([20, 12, 13, 14, 15]), table))
    attention.append(0, k, v)
    out = attention.run(0, q)
    order = [1, 2, 3, 4, 0]
    torch.testing.assert_close(out[:1], dense(q[:1], k[order], v[order]))
    torch.testing.assert_close(out[1:], dense(q[1:], k[1:], v[1:]))


def test_a_reused_block_keeps_no_nan_of_a_failed_row(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32, num_blocks=12)
    rows.step(("bad", 8))
    rows.pool.blocks[:, rows.blocks["bad"]] = float("nan")
    rows.free.extend(rows.blocks.pop("bad"))
    rows.step(("a", 5), ("b", 1))
    rows.step(("a", 1), ("b", 3))


@BOTH
@pytest.mark.parametrize("queries", [1, 3])
def test_one_row_that_is_nan_leaves_the_others_alone(backend, dtype, queries):
    spec = spec_of(4, 2, 32, layers=1)
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(2, 3, queries, 2, 32, generator=generator).to(dtype)
    q = torch.randn(3, queries, 4, 32, generator=generator).to(dtype)
    lens, table = np.full(3, queries, np.int32), np.array([[1], [2], [3]], np.int32)
    slots = np.concatenate([np.arange(4 * block, 4 * block + queries) for block in (1, 2, 3)])
    everything = (q, *kv)
    # torch's attention returns zeros if only keys are NaN, so torch is tested only with NaN in q, k and v
    # together.
    for bad in [everything] if backend is TorchPagedAttention else [everything, (q,), (kv[0],), (kv[1],)]:
        was = [part[1, 0].clone() for part in bad]
        for part in bad:
            part[1, 0] = float("nan")
        attention = backend(spec, KVPool(spec, 8, 4, dtype, CpuDevice()))
        attention.begin(AttentionMeta(lens, lens, slots, table))
        attention.append(0, *kv.flatten(1, 2))
        out = attention.run(0, q.flatten(0, 1)).view_as(q)
        for row in (0, 2):
            want = dense(q[row], kv[0, row], kv[1, row])
            torch.testing.assert_close(out[row].float(), want, atol=TOLERANCE[dtype], rtol=0.02)
        assert out[1, 0].isnan().all()
        for part, value in zip(bad, was, strict=True):
            part[1, 0] = value


def test_the_dummy_block_is_never_written(backend):
    rows = Rows(backend, spec_of(4, 2, 32), torch.float32)
    rows.step(("a", 7), ("b", 30))
    rows.step(("a", 1), ("b", 1))
    assert not rows.pool.blocks[:, 0].any()


def test_fused_projections_need_not_be_contiguous(backend):
    spec = spec_of(4, 2, 32, layers=1)
    pool = KVPool(spec, 4, 4, torch.float32, CpuDevice())
    attention = backend(spec, pool)
    fused = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(3))
    q, k, v = fused.split((4, 2, 2), dim=1)
    three = np.array([3], np.int32)
    attention.begin(AttentionMeta(three, three, np.array([8, 9, 10]), np.array([[2]], np.int32)))
    attention.append(0, k, v)
    torch.testing.assert_close(attention.run(0, q), dense(q, k, v))


def filled(kernels, dtype, seed=5):
    """Return a spec, and a function that computes attention over a random KV pool. The function's rows are
    tuples (number of queries, number of KV tokens, the row's blocks).
    """
    spec = spec_of(8, 2, 72, layers=1)
    pool = KVPool(spec, 200, 16, dtype, CpuDevice())
    pool.blocks.normal_(generator=torch.Generator().manual_seed(seed))
    attention = kernels(spec, pool)

    def attend(rows, q, drafts=None):
        counts, lens = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
        none = np.zeros(counts.sum(), np.int64)
        table = np.array([row[2] for row in rows], np.int32)
        attention.begin(AttentionMeta(counts, lens, none, table, drafts and np.array(drafts)))
        return attention.run(0, q)

    return spec, attend


@BOTH
def test_a_row_depends_neither_on_threads_nor_on_the_others(kernels, dtype):
    """A row's results have the same bits in a batch, alone, in another order, and with 1 or 2 threads."""
    spec, attend = filled(kernels, dtype)
    random = np.random.default_rng(1)
    rows = [
        (count, length, random.integers(1, 200, 50))
        for count, length in [(1, 700), (300, 720), (1, 1), (5, 5), (40, 600), (1, 64), (2, 130), (1, 513)]
    ]
    queries = [torch.randn(row[0], spec.num_heads, spec.head_dim).to(dtype) for row in rows]
    together = attend(rows, torch.cat(queries)).split([row[0] for row in rows])
    threads = torch.get_num_threads()
    for order in ([0], [1], [2, 3], [7, 6, 5, 4, 3, 2, 1, 0], [4, 0], [5, 7, 2, 0]):
        for count in (1, 2):
            torch.set_num_threads(count)
            try:
                out = attend([rows[i] for i in order], torch.cat([queries[i] for i in order]))
            finally:
                torch.set_num_threads(threads)
            for part, i in zip(out.split([rows[i][0] for i in order]), order, strict=True):
                assert torch.equal(part, together[i])


@BOTH
def test_a_query_does_not_depend_on_where_its_chunk_was_cut(kernels, dtype):
    spec, attend = filled(kernels, dtype)
    blocks = np.random.default_rng(2).integers(1, 200, 50)
    q = torch.randn(600, spec.num_heads, spec.head_dim).to(dtype)
    whole = attend([(600, 700, blocks)], q)
    for start, stop in ((0, 600), (0, 7), (7, 300), (300, 302), (413, 600)):
        assert torch.equal(attend([(stop - start, 100 + stop, blocks)], q[start:stop]), whole[start:stop])


@BOTH
@pytest.mark.parametrize("length", [16, 63, 70, 700])
def test_drafts_have_the_bits_of_single_tokens(kernels, dtype, length):
    """The drafts are computed in one step with a prompt. For some lengths, only the later drafts read keys
    from the next span of 64 keys.
    """
    spec, attend = filled(kernels, dtype)
    blocks = np.random.default_rng(3).integers(1, 200, 50)
    q = torch.randn(16, spec.num_heads, spec.head_dim).to(dtype)
    alone = torch.cat([attend([(1, length - 15 + i, blocks)], q[i : i + 1]) for i in range(16)])
    for count in (2, 5, 16):
        end = length - 16 + count
        rows = [(3, 90, blocks), (count, end, blocks)]
        verified = attend(rows, torch.cat((q[:3], q[:count])), [0, count - 1])
        assert torch.equal(verified[3:], alone[:count])


@BOTH
def test_scores_far_apart_do_not_overflow(kernels, dtype):
    spec, attend = filled(kernels, dtype)
    for count in (1, 90):
        q = torch.randn(count, spec.num_heads, spec.head_dim).to(dtype) * 1000
        assert attend([(count, 90, np.arange(1, 51))], q).isfinite().all()


@pytest.mark.parametrize("head_dim, dtype", [(12, torch.float32), (520, torch.float32), (64, torch.float16)])
def test_unsupported_shapes_are_left_to_torch(head_dim, dtype):
    spec = spec_of(4, 2, head_dim)
    pool = KVPool(spec, 4, 4, dtype, CpuDevice())
    assert isinstance(make_backend("auto", spec, pool), TorchPagedAttention)
    with pytest.raises(ConfigError, match="'native' cannot be used: it supports .* choose 'torch'"):
        make_backend("native", spec, pool)


def test_auto_chooses_the_kernels_if_available():
    spec = spec_of(4, 2, 32)
    chosen = make_backend("auto", spec, KVPool(spec, 4, 4, torch.bfloat16, CpuDevice()))
    assert type(chosen) is (TorchPagedAttention if load() is None else NativePagedAttention)
