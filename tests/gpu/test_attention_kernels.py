"""Tests of the Triton attention kernels, on a GPU or in Triton's interpreter.

The results equal dense attention. A token's result has the same bits, however a row's tokens are divided into
steps.
"""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.gpu.attention_tiles import ONE_TILE_ROWS
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.triton_capability import load
from mmengine.runtime.attention.triton_paged import TritonPagedAttention
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.kv.pool import KVPool
from tests.native.attention_cases import TOLERANCE, Rows, dense, spec_of

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


@contextmanager
def short_spans():
    """Use spans with few keys, so that even short rows have several spans."""
    from mmengine.gpu import attention_kernels, attention_tiles

    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_kernels, attention_tiles):
            patch.setattr(module, "SPAN", 64)
        yield


def make(spec, kv, programs=2, **options):
    """Build a backend without its trial run. If there are more `programs` than tiles, each span is
    computed as a separate part.
    """
    backend = TritonPagedAttention(spec, kv, **({"kernels": load()} | options))
    backend._programs = programs
    return backend


@settings(max_examples=8, deadline=None)
@given(
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([6, 16, 32, 40]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    programs=st.sampled_from([1, 3, 50]),
    first=st.integers(1, 90),
    steps=st.lists(
        st.dictionaries(st.sampled_from("abc"), st.sampled_from([1, 1, 4, 11]), min_size=1),
        min_size=1,
        max_size=3,
    ),
)
def test_ragged_steps_are_as_dense_attention(
    kernel_device, group, kv_heads, head_dim, block_size, dtype, programs, first, steps
):
    """Unwritten positions hold NaN (see Rows), so the result would show that a kernel read them."""
    spec = spec_of(group * kv_heads, kv_heads, head_dim, layers=1)
    with short_spans():
        rows = Rows(
            partial(make, programs=programs), spec, dtype, block_size, 1 + 260 // block_size, 0, kernel_device
        )
        rows.step(("a", first))
        for step in steps:
            rows.step(*step.items())


@FLOATS
def test_a_new_backend_is_tried_beside_torch(kernel_device, dtype):
    """The trial accepts the kernels for several shapes and block sizes, with and without fp8."""
    for heads, kv_heads, head_dim, block_size, is_fp8 in ((4, 2, 6, 16, False), (6, 1, 16, 1, True)):
        spec = spec_of(heads, kv_heads, head_dim)
        kv = KVPool(spec, 4, block_size, dtype, open_device(str(kernel_device)), is_fp8=is_fp8)
        for one_tile in (False, True):
            TritonPagedAttention(spec, kv, one_tile=one_tile)


def test_heads_as_wide_as_they_may_be(kernel_device):
    rows = Rows(make, spec_of(2, 1, 256, layers=1), torch.float16, 16, device=kernel_device)
    rows.step(("a", 40), ("b", 1))
    rows.step(("a", 1), ("b", 1))


def filled(device, dtype, **options):
    """Return a model spec, and a function that computes attention over a pool of random KV.

    The function takes rows (number of queries, number of KV tokens, block ids) and q [t, heads, d].
    """
    spec = spec_of(4, 2, 16, layers=1)
    pool = KVPool(spec, 60, 4, dtype, open_device(str(device)))
    pool.blocks.copy_(torch.randn(pool.blocks.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    attention = make(spec, pool, one_tile=True, **options)

    def attend(rows, q):
        counts, lens, tables = zip(*rows, strict=True)
        counts, lens = np.array(counts, np.int32), np.array(lens, np.int32)
        none = np.zeros(counts.sum(), np.int64)
        attention.begin(AttentionMeta(counts, lens, none, np.stack(tables).astype(np.int32)))
        assert attention._step[1].rows == ONE_TILE_ROWS, (
            "with other tile sizes a GPU may sum in another order"
        )
        return attention.run(0, q.to(device)).cpu()

    return spec, attend


@FLOATS
def test_a_query_has_the_same_bits_alone_in_a_chunk_and_beside_drafts(kernel_device, dots_in_order, dtype):
    """Compute some queries of a 70-token chunk in other steps, and compare their bits with the chunk's.

    A row's spans are computed by one program (`together`) or by several (`apart`).
    """
    with short_spans():
        spec, together = filled(kernel_device, dtype, programs=1)
        _, apart = filled(kernel_device, dtype, programs=99)
        random = np.random.default_rng(2)
        blocks, other = random.permutation(np.arange(1, 60))[:50].reshape(2, 25)
        q = torch.randn(70, spec.num_heads, spec.head_dim, generator=torch.Generator().manual_seed(3)).to(
            dtype
        )
        whole = together([(70, 100, blocks)], q)
        for start, stop in ((0, 1), (33, 34), (69, 70), (0, 5), (30, 36), (17, 70)):
            for attend in (together, apart):
                got = attend([(stop - start, 30 + stop, blocks)], q[start:stop])
                assert torch.equal(got, whole[start:stop])
        for attend in (together, apart):
            mixed = torch.cat((q[:3], q[60:61], q[65:70], q[4:5]))
            got = attend([(3, 77, other), (1, 91, blocks), (5, 100, blocks), (1, 2, other)], mixed)
            assert torch.equal(got[3:9], torch.cat((whole[60:61], whole[65:70])))


@FLOATS
def test_scores_far_apart_do_not_overflow(kernel_device, dtype):
    spec, attend = filled(kernel_device, dtype)
    q = torch.randn(9, spec.num_heads, spec.head_dim).to(dtype) * 1000
    assert attend([(9, 90, np.arange(1, 26))], q).isfinite().all()


def test_every_byte_of_fp8_is_its_value(kernel_device):
    """Attention over one token returns the token's V, which contains all 256 bytes."""
    spec = spec_of(2, 2, 128, layers=1)
    for dtype in (torch.float32, torch.float16):
        kv = KVPool(spec, 2, 1, dtype, open_device(str(kernel_device)), is_fp8=True)
        attention = make(spec, kv)
        every = torch.arange(256, dtype=torch.uint8).view(1, 2, 128)
        kv.blocks[0, 1, 1] = every.to(kernel_device)
        one = np.ones(1, np.int32)
        attention.begin(AttentionMeta(one, one, np.array([1]), np.array([[1]], np.int32)))
        assert attention.cache_of(0) is None
        got = attention.run(0, torch.zeros(1, 2, 128, dtype=dtype, device=kernel_device)).cpu()
        want = every.view(torch.float8_e4m3fn).to(dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_an_fp8_pool_holds_rounded_keys_and_values(kernel_device):
    spec = spec_of(4, 2, 16, layers=1)
    kv = KVPool(spec, 8, 4, torch.float16, open_device(str(kernel_device)), is_fp8=True)
    attention = make(spec, kv)
    five = np.array([5], np.int32)
    attention.begin(AttentionMeta(five, five, np.array([16, 17, 18, 19, 8]), np.array([[4, 2]], np.int32)))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 16, generator=generator).half() for heads in (4, 2, 2))
    k[0, 0, 0] = 1000.0  # above the fp8 range, and must not become NaN
    attention.append(0, k.to(kernel_device), v.to(kernel_device))
    got = attention.run(0, q.to(kernel_device)).cpu().float()
    keys, values = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v))
    torch.testing.assert_close(got, dense(q, keys, values), atol=TOLERANCE[torch.float16], rtol=0.02)


def test_no_kernel_is_compiled_anew_for_other_steps(kernel_device, monkeypatch):
    """Check that a new backend's trial covers everything that Triton compiles.

    Triton compiles again if a pointer's alignment to 16 bytes or a number's divisibility by 16 changes, or if
    a number is 1.
    """
    if kernel_device.type != "cpu":
        pytest.skip("this test observes Triton's interpreter, which runs only on a CPU")
    from triton.runtime.interpreter import InterpretedFunction

    # `seen`: the kernels and specialisations that a GPU would compile
    seen, run = set(), InterpretedFunction.run

    def noted(self, *arguments, **options):
        kinds, free = [], self.kwargs["do_not_specialize"] or ()
        for name, value in zip(self.arg_names, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                assert value.data_ptr() % 16 == 0, name
            elif name not in free and name != "q_stride":  # q_stride depends on the model
                kinds.append((value % 16 == 0, value == 1))
        if self.__name__.endswith("_kernel"):
            kept = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
            seen.add((self.__name__, *kinds, *sorted(kept.items())))
        return run(self, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    spec = spec_of(2, 2, 6, layers=1)
    rows = Rows(TritonPagedAttention, spec, torch.float32, 4, 200)
    attention, compiled = rows.backend, set(seen)
    assert {name for name, *_ in compiled} == {"_attend_kernel", "_join_kernel"}
    rows.step(("a", 1))
    rows.step(("a", 1), ("b", 29), ("c", 3))
    rows.step(("b", 231))
    rows.step(("b", 5))
    rows.step(("b", 1), ("c", 1))
    for bucket in (Bucket(5, 3), Bucket(5, 1), Bucket(3, 1)):
        full = np.full(bucket.num_rows, bucket.query_len, np.int32)
        slots = np.arange(bucket.num_tokens, dtype=np.int64) % 4
        attention.begin(AttentionMeta(full, full, slots, np.zeros((bucket.num_rows, 1), np.int32)), bucket)
        attention.run(0, torch.zeros(bucket.num_tokens, 2, 6))
    assert seen == compiled


class Watched:
    """Replaces the module attention_kernels and records the Work of each call in `works`."""

    def __init__(self):
        from mmengine.gpu import attention_kernels

        self._kernels, self.works = attention_kernels, []

    def attend(self, q, blocks, work):
        self.works.append(work)
        return self._kernels.attend(q, blocks, work)


@pytest.mark.parametrize("query_len, programs", [(1, 2), (1, 50), (4, 50)])
def test_a_captured_step_reads_buffers_that_stay(kernel_device, query_len, programs):
    """A replay whose rows have other lengths than in the capture uses the capture's buffers, and gives right
    results.

    The step has a padding row and padding drafts. Unwritten KV is NaN.
    """
    spec, size, kernels = spec_of(4, 2, 16), 4, Watched()
    kv = KVPool(spec, 80, size, torch.float32, open_device(str(kernel_device)))
    attention = make(spec, kv, programs, kernels=kernels)
    bucket, generator = Bucket(3, query_len), torch.Generator().manual_seed(0)
    counts = np.full(3, query_len, np.int32)
    with short_spans():
        for first in (Bucket(3, 4), bucket):
            slots = np.arange(first.num_tokens, dtype=np.int64) % size
            full = np.full(3, first.query_len, np.int32)
            attention.begin(AttentionMeta(full, full, slots, np.zeros((3, 1), np.int32)), first)
        captured = attention._step[1]
        for lens in ([9, 4, 100], [70, 8, 130]):
            kv.blocks.fill_(float("nan"))  # in the dummy block too
            table = (
                np.random.default_rng(1).permutation(np.arange(1, 76))[:72].reshape(2, 36).astype(np.int32)
            )
            table = np.concatenate((table, np.zeros((1, 36), np.int32)))[[0, 2, 1]]
            kv_lens = np.array([lens[0], query_len, lens[2]], np.int32)
            index = kv_lens[:, None] - query_len + np.arange(query_len)
            slots = np.take_along_axis(table, index // size, 1) * size + index % size
            slots[1] %= size  # a padding row
            slots[0, 1:] %= size  # padding drafts
            attention.begin(AttentionMeta(counts, kv_lens, slots.reshape(-1).astype(np.int64), table), bucket)
            assert attention._step[1] is captured, "a replay only reads the buffers of the capture"
            own = [lens[0] - query_len + 1, 0, lens[2]]
            known = {}
            for row in (0, 2):
                known[row] = torch.randn(2, own[row], 2, 16, generator=generator)
                at = np.arange(own[row])
                blocks = torch.from_numpy(table[row][at // size]).long()
                for which in (0, 1):
                    kv.layers[1][blocks, which, torch.from_numpy(at % size)] = known[row][which].to(
                        kernel_device
                    )
            q = torch.randn(3 * query_len, 4, 16, generator=generator)
            got = attention.run(1, q.to(kernel_device)).cpu().view(3, query_len, 4, 16)
            q = q.view_as(got)
            torch.testing.assert_close(got[0, :1], dense(q[0, :1], *known[0]), atol=2e-5, rtol=0.02)
            torch.testing.assert_close(got[2], dense(q[2], *known[2]), atol=2e-5, rtol=0.02)
            assert got.isfinite().all() and not got[1].any()
    assert all(work is captured for work in kernels.works)
