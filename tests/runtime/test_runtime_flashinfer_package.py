"""Tests the FlashInfer backend with the installed package. Only the compiled kernels are replaced.

The wrappers' checks, copies and calls are real. The tests need neither a GPU nor a compiler.
"""

import numpy as np
import pytest
import torch
from flashinfer_fake import attend

from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.flashinfer_paged import FlashInferAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.graphs.buckets import empty_step
from mmengine.runtime.kv.pool import KVPool
from tests.native.attention_cases import Rows, dense, spec_of

flashinfer = pytest.importorskip(
    "flashinfer", reason="no FlashInfer here; `make test` gets it into build/gpu"
)
SIZE = 16


class Kernels:
    """A fake compiled module on a CPU.

    Records plans, and computes attention from the planned page lists.
    """

    def __init__(self, decodes, plans):
        self._decodes, self._plans = decodes, plans

    def plan(self, floats, ints, pinned, *given):
        assert ints.dtype == pinned.dtype == torch.uint8 and ints.shape == pinned.shape
        self._plans.append((self._decodes, pinned.data_ptr(), given))
        return [0]

    def run(self, floats, ints, plan, q, k, v, indptr, indices, last, out, *others):
        queries = torch.arange(len(last) + 1, dtype=torch.int32)
        self._attend(q, k, v, queries, indptr, indices, last, out, False)

    def paged_run(self, floats, ints, plan, q, k, v, queries, indptr, indices, last, out, lse, mask, *others):
        self._attend(q, k, v, queries, indptr, indices, last, out, mask == 1)

    def _attend(self, q, k, v, queries, indptr, indices, last, out, causal):
        for each in (queries, indptr, indices, last):
            assert each.dtype == torch.int32
        for row in range(len(last)):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(pages) - 1) * k.shape[1] + int(last[row])
            keys, values = (cache[pages].flatten(0, 1)[:length].float() for cache in (k, v))
            own = slice(int(queries[row]), int(queries[row + 1]))
            out[own] = attend(q[own].float(), keys, values, causal).to(out.dtype)


@pytest.fixture
def plans(monkeypatch):
    """Replace the compiled modules, and return the list in which they record their plans."""
    plans, empty = [], torch.empty
    for module in (flashinfer.decode, flashinfer.prefill):
        for name, decodes in (("get_batch_decode_module", True), ("get_batch_prefill_module", False)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *types, _=decodes: Kernels(_, plans))
    unpinned = lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)  # noqa: E731
    monkeypatch.setattr(torch, "empty", unpinned)
    return plans


def make(spec, kv):
    return FlashInferAttention(spec, kv, flashinfer)


@pytest.mark.parametrize("heads", [4, 8])  # with 2 KV heads, only 8 heads use tensor cores
def test_ragged_steps_are_as_dense_attention(plans, heads):
    rows = Rows(make, spec_of(heads, 2, 64), torch.bfloat16, SIZE)
    rows.step(("a", 5), ("b", 1), ("c", 40))
    rows.step(("a", 1), ("b", 1), ("c", 1))
    rows.step(("b", 1), ("a", 3), ("c", 1), ("d", 2 * SIZE))
    rows.step(("a", 2), ("b", 20))
    assert [decodes for decodes, _, _ in plans[-6:-4]] == [heads == 4, False]


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("query_len", [1, 4])
def test_captured_steps(plans, heads, query_len):
    """In a captured bucket with a padding row, the other rows get dense attention."""
    spec = spec_of(heads, 2, 64)
    kv = KVPool(spec, 40, SIZE, torch.bfloat16, CpuDevice())
    flash = make(spec, kv)
    for bucket in (Bucket(8, 4), Bucket(4, 4), Bucket(8, 1), Bucket(4, 1)):
        flash.begin(empty_step(bucket, SIZE), bucket)
        q, k, v = (torch.zeros(bucket.num_tokens, n, 64, dtype=torch.bfloat16) for n in (heads, 2, 2))
        flash.append(0, k, v)
        flash.run(0, q)
    torch.manual_seed(0)
    for lens in ([40, 16, 5], [41, 17, 4]):
        kv.blocks.normal_()
        kv_lens = np.array([*lens, query_len], np.int32)
        table = np.array([[3, 5, 7], [9, 2, 0], [4, 0, 0], [0, 0, 0]], np.int32)
        index = kv_lens[:, None] - query_len + np.arange(query_len)
        slots = (np.take_along_axis(table, index // SIZE, 1) * SIZE + index % SIZE).ravel().astype(np.int64)
        counts = np.full(4, query_len, np.int32)
        flash.begin(AttentionMeta(counts, kv_lens, slots, table), Bucket(4, query_len))
        q, k, v = (torch.randn(4 * query_len, n, 64).bfloat16() for n in (heads, 2, 2))
        flash.append(1, k, v)
        got = flash.run(1, q)
        for row, length in enumerate(lens):
            blocks = torch.from_numpy(table[row]).long()
            keys, values = (kv.layers[1][blocks, which].flatten(0, 1)[:length] for which in (0, 1))
            own = slice(row * query_len, (row + 1) * query_len)
            want = dense(q[own], keys, values)
            torch.testing.assert_close(got[own].float(), want, atol=3e-2, rtol=0.02)
    before, after = (pinned for _, pinned, _ in plans[-2:])
    assert before != after, "two steps in flight must use two pinned buffers"
