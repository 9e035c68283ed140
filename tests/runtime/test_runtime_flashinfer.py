"""Tests of the FlashInfer backend on a CPU, with fake wrappers.

The calls must fit FlashInfer's recorded signatures. The fakes compute attention from the planned index lists
alone, so wrong lists give wrong results.
"""

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flashinfer_fake import RECORD, fake_library, recorded, signatures

from mmengine.errors import ConfigError
from mmengine.runtime.attention import (
    flashinfer_capability,
    flashinfer_paged,
    registry,
    torch_paged,
    triton_capability,
    triton_paged,
)
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.flashinfer_host_plan import HostPlan
from mmengine.runtime.attention.flashinfer_paged import FLOAT_WORKSPACE_BYTES, FlashInferAttention
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.graphs.buckets import empty_step
from mmengine.runtime.kv.pool import KVPool
from tests.native.attention_cases import TOLERANCE, Rows, dense, spec_of


def backend(log=None):
    return lambda spec, kv: FlashInferAttention(spec, kv, fake_library(log))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(4, 2, 64, 4), (8, 1, 128, 16), (2, 2, 256, 8)])
def test_ragged_steps_are_as_dense_attention(shape, dtype):
    heads, kv_heads, head_dim, block_size = shape
    rows = Rows(backend(), spec_of(heads, kv_heads, head_dim), dtype, block_size)
    rows.step(("a", 5), ("b", 1), ("c", 17))
    rows.step(("a", 1), ("b", 1), ("c", 1))
    rows.step(("b", 1), ("a", 3), ("d", 2 * block_size))
    rows.step(("a", 1), ("c", 4), ("b", 1), ("d", 1))
    rows.share("e", "d", block_size)
    rows.step(("e", 2), ("d", 1), ("a", 1))
    rows.step(("e", 1))


def test_one_plan_a_kind_and_steps_take_turns_with_pinned_buffers():
    # A step has a plan for its decode rows and a plan for its prompt rows, and all layers use these plans.
    log = []
    rows = Rows(backend(log), spec_of(4, 2, 64), torch.float32)
    log.clear()
    rows.step(("a", 5))
    assert [entry[0] for entry in log] == ["plan", "run", "run"], "one plan for all layers"
    rows.step(("a", 1), ("b", 3))
    assert [entry[0] for entry in log[3:]] == ["plan", "plan", "run", "run", "run", "run"]
    workspaces = {entry[1].int_workspace.data_ptr() for entry in log if entry[0] == "plan"}
    assert len(workspaces) == 2, "two plans of one step must not overwrite one another"
    log.clear()
    for _ in range(4):
        rows.step(("a", 1), ("b", 1))
    pinned = [entry[2].data_ptr() for entry in log if entry[0] == "plan"]
    assert pinned[0] == pinned[2] != pinned[1] == pinned[3]


def test_a_pinned_buffer_is_written_when_its_last_copy_is_done():
    # Two pinned buffers take turns. A plan waits for the last copy from its buffer.
    order = []

    class Watched:
        def __init__(self, name):
            self.name = name

        def record(self):
            order.append(f"record {self.name}")

        def synchronize(self):
            order.append(f"wait {self.name}")

    class Wrapper:
        _pin_memory_int_workspace_buffer = None

        def plan(self):
            order.append("plan")

    host_plan = HostPlan(CpuDevice(), (Watched("a"), Watched("b")))
    for _ in range(3):
        host_plan.plan(Wrapper())
    one, two = ["wait b", "plan", "record b"], ["wait a", "plan", "record a"]
    assert order == [*one, *two, *one]


def test_a_version_that_stores_plans_differently_is_refused():
    with pytest.raises(ConfigError, match="install flashinfer-python 0.7.2"):
        HostPlan(CpuDevice()).attach(object(), torch.zeros(1))


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_captured_step_reads_buffers_that_stay(query_len):
    """A later step in the same bucket uses the captured wrapper and buffers."""
    log = []
    spec, size = spec_of(4, 2, 64), 4
    kv = KVPool(spec, 40, size, torch.float32, CpuDevice())
    flash = backend(log)(spec, kv)
    flash.begin(meta_of(Bucket(8, 4), size), Bucket(8, 4))
    bucket = Bucket(4, query_len)
    flash.begin(meta_of(bucket, size), bucket)
    captured, places = flash._calls[0][1], flash._places.data_ptr()
    torch.manual_seed(0)
    for lens in ([9, 4, 30, 5], [10, 8, 31, 4]):
        kv.blocks.normal_()
        made = sum(entry[0] == "made" for entry in log)
        table = np.random.default_rng(1).permutation(np.arange(1, 37)).reshape(4, 9).astype(np.int32)
        kv_lens = np.array(lens, np.int32)
        index = kv_lens[:, None] - query_len + np.arange(query_len)
        slots = (np.take_along_axis(table, index // size, 1) * size + index % size).reshape(-1)
        counts = np.full(4, query_len, np.int32)
        flash.begin(AttentionMeta(counts, kv_lens, slots.astype(np.int64), table), bucket)
        assert sum(entry[0] == "made" for entry in log) == made, "no wrapper is made for a replay"
        assert flash._calls[0][1] is captured and flash._places.data_ptr() == places
        q, k, v = (torch.randn(4 * query_len, heads, 64) for heads in (4, 2, 2))
        flash.append(1, k, v)
        got = flash.run(1, q)
        for row in range(4):
            blocks = torch.from_numpy(table[row]).long()
            keys, values = (kv.layers[1][blocks, which].flatten(0, 1)[: lens[row]] for which in (0, 1))
            own = slice(row * query_len, (row + 1) * query_len)
            torch.testing.assert_close(keys[-query_len:], k[own])
            torch.testing.assert_close(got[own], dense(q[own], keys, values), atol=2e-5, rtol=0.02)


def partial_bytes(bucket, spec, multiprocessors):
    """Return the bytes that FlashInfer reserves for partial results in a captured step.

    Source: scheduler.cuh in 0.7.2 (PrefillSplitQOKVIndptr, FA2DetermineCtaTileQ, PrefillPlanImpl).
    """
    group = spec.num_heads // spec.num_kv_heads
    packed = bucket.query_len * group
    tile = 128 if packed > 64 and spec.head_dim < 256 else 64 if packed > 16 else 16
    tiles = bucket.num_rows * -(-packed // tile)
    # FlashInfer's decode wrapper has no uniform_q_len. It plans as if a row could have any number of queries,
    # so each row except the first may add a tile.
    if bucket.query_len == 1:
        tiles = -(-bucket.num_rows * group // tile) + bucket.num_rows - 1
    padded = max(2 * multiprocessors // spec.num_kv_heads, tiles)
    return spec.num_heads * -(-padded * tile // group) * (spec.head_dim + 1) * 4


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (64, 8, 128), (32, 4, 256), (16, 1, 128)])
def test_the_workspace_fits_all_captured_steps(heads):
    """The largest buckets have 2,048 rows and 16 drafts. An H100 has 132 multiprocessors."""
    spec, log = spec_of(*heads), []
    flash = backend(log)(spec, KVPool(spec, 4, 16, torch.bfloat16, CpuDevice()))
    for rows in (1, 16, 64, 128, 512, 2048):
        for query_len in (17, 9, 5, 1):
            bucket, flash._buffers = Bucket(rows, query_len), ()
            flash.begin(empty_step(bucket, 16), bucket)
            is_split = not log[-1][1].planned.given["disable_split_kv"]
            assert is_split or rows * spec.num_kv_heads > 264, (
                "splitting is disabled only if the rows alone occupy the GPU"
            )
            if is_split:
                assert partial_bytes(bucket, spec, 132) <= FLOAT_WORKSPACE_BYTES, bucket
    flash.begin(empty_step(Bucket(512, 1), 16))
    assert not log[-1][1].planned.given["disable_split_kv"]


def meta_of(bucket, size):
    """Return the metadata for a step with all rows in the dummy block."""
    counts = np.full(bucket.num_rows, bucket.query_len, np.int32)
    slots = np.arange(bucket.num_tokens, dtype=np.int64) % size
    return AttentionMeta(counts, counts, slots, np.zeros((bucket.num_rows, 4), np.int32))


@pytest.mark.parametrize("make", [backend(), TorchPagedAttention], ids=["flashinfer", "torch"])
def test_an_fp8_pool_holds_rounded_keys_and_values(make):
    spec = spec_of(4, 2, 64)
    kv = KVPool(spec, 8, 4, torch.bfloat16, CpuDevice(), is_fp8=True)
    assert kv.blocks.element_size() == kv.layers[0].element_size() == 1
    attention = make(spec, kv)
    lens, table = np.array([3, 5], np.int32), np.array([[1, 0], [4, 2]], np.int32)
    slots = np.array([4, 5, 6, 16, 17, 18, 19, 8])
    attention.begin(AttentionMeta(lens, lens, slots, table))
    assert attention.cache_of(0) is None
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    k[0, 0, 0] = 1000.0  # above the fp8 range; must not become NaN
    attention.append(0, k, v)
    got = attention.run(0, q).float()
    keys, values = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v))
    for row in (slice(0, 3), slice(3, 8)):
        want = dense(q[row], keys[row], values[row])
        torch.testing.assert_close(got[row], want, atol=TOLERANCE[torch.bfloat16], rtol=0.02)
    assert got.isfinite().all()


def test_the_recorded_version_is_a_required_version():
    version = json.loads(RECORD.read_text())["version"]
    assert version.startswith("0.7.2") and len(signatures()) == 11


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer: see `make test`")
def test_the_record_equals_the_installed_package():
    module = flashinfer_capability.load()
    assert recorded(module) == json.loads(RECORD.read_text())["calls"]


def pool_of(spec, dtype=torch.bfloat16):
    return KVPool(spec, 4, 16, dtype, CpuDevice())


@pytest.mark.parametrize(
    "version, capability, told",
    [
        (None, (9, 0), "not installed; pip install '.[cuda]'"),
        ("0.6.13", (9, 0), "0.6.13 is installed, and 0.7.2 up to, not including, 0.8 is needed; pip install"),
        ("0.8.0", (9, 0), "0.8.0 is installed"),
        ("0.7.2.post1", (7, 5), "compute capability 7.5, and 8.0 is needed"),
        ("0.7.2.post1", (9, 0), None),
        ("0.7.3", (8, 0), None),
    ],
)
def test_missing_parts_are_reported_with_advice(monkeypatch, version, capability, told):
    monkeypatch.setattr(flashinfer_capability, "installed", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = flashinfer_capability.missing(CudaDevice())
    assert found is None if told is None else told in found


def test_an_unsupported_model_is_reported(monkeypatch):
    monkeypatch.setattr(flashinfer_capability, "installed", lambda: "0.7.2")
    spec = spec_of(4, 2, 32)
    assert "heads of 64, 128, 256 values, not of 32" in flashinfer_capability.unfit(spec, pool_of(spec))
    spec = spec_of(4, 2, 64)
    assert "not float32" in flashinfer_capability.unfit(spec, pool_of(spec, torch.float32))
    with pytest.raises(ConfigError, match="KV pool is on cpu; choose 'torch' or 'auto'"):
        registry.make_backend("flashinfer", spec, pool_of(spec))


def on_a_gpu():
    """Return a fake KV pool on a GPU."""
    return SimpleNamespace(device=CudaDevice())


def test_kernels_that_do_not_compile_are_reported_and_auto_continues(monkeypatch):
    spec = spec_of(4, 2, 64)

    def broken(spec, kv):
        library = fake_library()
        monkeypatch.setattr("flashinfer_fake.FakeWrapper.plan", no_compiler)
        return FlashInferAttention(spec, pool_of(spec), library)

    def no_compiler(self, *arguments, **options):
        raise RuntimeError("Ninja is not found\nand much more")

    with pytest.raises(ConfigError, match=r"Ninja is not found\); they need nvcc, ninja and a C"):
        broken(spec, pool_of(spec))
    told = []
    kept = SimpleNamespace(
        warning=lambda what, **why: told.append((what, why)),
        info=lambda what, **why: told.append((what, why)),
    )
    monkeypatch.setattr(registry, "log", kept)
    monkeypatch.setattr(flashinfer_paged, "FlashInferAttention", broken)
    monkeypatch.setattr(triton_paged, "TritonPagedAttention", lambda spec, kv: "triton")
    monkeypatch.setattr(torch_paged, "TorchPagedAttention", lambda spec, kv: "torch")
    monkeypatch.setattr(flashinfer_capability, "unfit", lambda spec, kv: None)
    monkeypatch.setattr(triton_capability, "unfit", lambda spec, kv: "it is old")
    assert registry.make_backend("auto", spec, on_a_gpu()) == "torch"
    monkeypatch.setattr(flashinfer_capability, "unfit", lambda spec, kv: "it is not installed")
    assert registry.make_backend("auto", spec, on_a_gpu()) == "torch"
    monkeypatch.setattr(triton_capability, "unfit", lambda spec, kv: None)
    assert registry.make_backend("auto", spec, on_a_gpu()) == "triton"
    (slow, first), (_, second), (other, third) = told
    assert "by torch, which is slower" in slow and other == "attention by triton"
    assert "Ninja is not found" in first["flashinfer"] and first["triton"] == "it is old"
    assert second["flashinfer"] == third["flashinfer"] == "it is not installed" and len(third) == 1


def test_on_a_cpu_auto_chooses_the_same():
    spec = spec_of(4, 2, 24)
    kv = KVPool(spec, 4, 16, torch.float16, CpuDevice())
    assert isinstance(registry.make_backend("auto", spec, kv), TorchPagedAttention)


def test_a_fused_kernel_stores_where_append_does():
    spec = spec_of(4, 2, 64)
    kv = KVPool(spec, 8, 4, torch.float32, CpuDevice())
    flash = backend()(spec, kv)
    slots = np.array([5, 6, 30, 12])
    counts, lens = np.array([2, 1, 1], np.int32), np.array([3, 3, 1], np.int32)
    flash.begin(AttentionMeta(counts, lens, slots, np.array([[1], [7], [3]], np.int32)))
    layer, there = flash.cache_of(1)
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 64)
    flash.append(1, k, v)
    for which, values in enumerate((k, v)):
        torch.testing.assert_close(layer[there // 4, which, there % 4], values)
    assert there.tolist() == slots.tolist()
