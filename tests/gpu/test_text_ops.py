"""Who does a decoder layer's operations: kernels that give torch's numbers, and torch else."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.gpu import text_ops
from tests.runtime.flashinfer_fake import signatures

CPU = torch.device("cpu")


def test_on_a_cpu_it_is_torch():
    assert text_ops.text_ops(CPU, torch.float32).by == dict.fromkeys(("norms", "gate", "rotation"), "torch")


def test_what_does_not_run_is_left_out_and_says_why():
    def missing():
        raise ModuleNotFoundError("No module named 'flashinfer'")

    def breaks():
        def silu_mul(x):
            raise RuntimeError("nvcc not found\nand pages more")

        return "a package 1.0", {"silu_mul": silu_mul}

    ops = text_ops.choose(text_ops.torch_ops(), "norms", missing, CPU, torch.float32)
    ops = text_ops.choose(ops, "gate", breaks, CPU, torch.float32)
    assert ops.by["norms"] == "torch (ModuleNotFoundError: No module named 'flashinfer')"
    assert ops.by["gate"] == "torch (RuntimeError: nvcc not found)"
    assert ops.silu_mul is text_ops.torch_ops().silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_gives_other_numbers_is_left_out(dtype):
    good = text_ops.torch_ops()
    for wrong in (
        {"silu_mul": lambda x: good.silu_mul(x) * 1.1},
        {"silu_mul": lambda x: good.silu_mul(x) * torch.nan},
        {"add_norm": lambda x, residual, weight, eps: good.rms_norm(x + residual, weight, eps)},
        {"norm_rotate": lambda *of: good.norm_rotate(*of[:-1], None)},
        {"norm_rotate": lambda qkv, weight, cos, sin, *of: good.norm_rotate(qkv, weight, cos, -sin, *of)},
    ):
        ops = text_ops.choose(good, "gate", lambda wrong=wrong: ("a package 1.0", wrong), CPU, dtype)
        assert ops.by["gate"].startswith("torch (a package 1.0 is ")
    same = {"silu_mul": lambda x: good.silu_mul(x)}
    assert (
        text_ops.choose(good, "gate", lambda: ("a package 1.0", same), CPU, dtype).by["gate"]
        == "a package 1.0"
    )


def test_flashinfers_functions_are_called_as_they_are_declared(monkeypatch):
    """They are bound to the recorded signatures, and computed by torch."""
    good, known = text_ops.torch_ops(), signatures()

    def rmsnorm(*of, **by_name):
        given = known["rmsnorm"].bind(*of, **by_name).arguments
        return good.rms_norm(given["input"], given["weight"], given["eps"])

    def fused_add_rmsnorm(*of, **by_name):
        given = known["fused_add_rmsnorm"].bind(*of, **by_name).arguments
        given["input"].copy_(good.add_norm(*(given[name] for name in ("input", "residual", "weight", "eps"))))

    def silu_and_mul(*of, **by_name):
        return good.silu_mul(known["silu_and_mul"].bind(*of, **by_name).arguments["input"])

    functions = {each.__name__: each for each in (rmsnorm, fused_add_rmsnorm, silu_and_mul)}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__version__="0.7.2", **functions))
    ops = text_ops.choose(good, "norms", text_ops.flashinfer_norms, CPU, torch.float16)
    ops = text_ops.choose(ops, "gate", text_ops.flashinfer_gate, CPU, torch.float16)
    assert ops.by["norms"] == ops.by["gate"] == "flashinfer 0.7.2"


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    half=st.sampled_from([1, 3, 8, 12, 20]),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    cached=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_rotation_is_torchs(
    kernel_device, tokens, heads, kv_heads, half, block_size, dtype, cached, seed
):
    """Also of a part of a wider matrix, and what it does not name stays as it was, to the bit."""
    _, functions = text_ops.our_rotation()
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, heads + 2 * kv_heads + 1, 2 * half, generator=generator).to(dtype)
    weight = torch.randn(heads + kv_heads, 2 * half, generator=generator).to(dtype)
    angles = torch.randn(tokens, half, generator=generator) * 100
    blocks = torch.randn(4, 2, block_size, kv_heads, 2 * half, generator=generator).to(dtype)
    places = np.random.default_rng(seed).permutation(4 * block_size)
    slots = torch.from_numpy(places[: min(tokens, len(places))])
    if len(slots) < tokens:
        slots = torch.arange(tokens) % len(places)
        cached = False
    found = []
    for function, device in (
        (functions["norm_rotate"], kernel_device),
        (text_ops.torch_ops().norm_rotate, CPU),
    ):
        mine, kept = wide.clone().to(device), blocks.clone().to(device)
        cache = (kept, slots.to(device)) if cached else None
        weights, cos, sin = (each.to(device) for each in (weight, angles.cos(), angles.sin()))
        function(mine[:, :-1], weights, cos, sin, 1e-6, heads, cache)
        found.append((mine.cpu(), kept.cpu()))
    (mine, kept), (wanted, wanted_kept) = found
    bound = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    assert (mine - wanted).abs().max() < bound and (kept - wanted_kept).abs().max() < bound
    untouched = slice(heads + kv_heads, None)
    assert torch.equal(mine[:, untouched], wide[:, untouched])
    if not cached:
        assert torch.equal(kept, blocks)
    elif tokens < 4 * block_size:
        others = torch.ones(4 * block_size, dtype=torch.bool)
        others[slots] = False
        rows, values = (each.transpose(1, 2).reshape(-1, 2 * kv_heads * 2 * half) for each in (kept, blocks))
        assert torch.equal(rows[others], values[others])
