"""Tests of the decoder layer's operations: which library is chosen, and that the kernels agree with torch."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.errors import ConfigError
from mmengine.gpu import text_ops
from tests.runtime.flashinfer_fake import signatures

CPU = torch.device("cpu")
NAMES = ("matmuls", "norms", "gate", "rotation")


def test_on_a_cpu_it_is_torch():
    assert text_ops.text_ops(CPU, torch.float32).by == dict.fromkeys(NAMES, "torch")


def test_a_failing_maker_is_skipped_with_the_reason():
    def missing():
        raise ModuleNotFoundError("No module named 'flashinfer'")

    def breaks():
        def silu_mul(x):
            raise RuntimeError("nvcc not found\nand pages more")

        return "a package 1.0", {"silu_mul": silu_mul}

    ops = text_ops.choose(text_ops.torch_ops(), "norms", (missing,), CPU, torch.float32)
    ops = text_ops.choose(ops, "gate", (breaks,), CPU, torch.float32)
    assert ops.by["norms"] == "torch (ModuleNotFoundError: No module named 'flashinfer')"
    assert ops.by["gate"] == "torch (RuntimeError: nvcc not found)"
    assert ops.silu_mul is text_ops.torch_ops().silu_mul


def test_the_next_choice_is_used_with_the_reason():
    good = text_ops.torch_ops()

    def missing():
        raise ModuleNotFoundError("No module named 'flashinfer'")

    def wrong():
        return "a package 1.0", {"silu_mul": lambda x: good.silu_mul(x) * 2}

    def ours():
        return "ours", {"silu_mul": lambda x: good.silu_mul(x)}

    ops = text_ops.choose(good, "gate", (missing, wrong, ours), CPU, torch.float32)
    said = (
        r"ours (ModuleNotFoundError: No module named 'flashinfer'; a package 1.0 is \d.\de[+-]\d\d off torch)"
    )
    assert re.fullmatch(said.replace("(", r"\(").replace(")", r"\)"), ops.by["gate"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_maker_with_other_numbers_is_skipped(dtype):
    good = text_ops.torch_ops()
    for wrong in (
        {"silu_mul": lambda x: good.silu_mul(x) * 1.1},
        {"silu_mul": lambda x: good.silu_mul(x) * torch.nan},
        {"add_norm": lambda x, residual, weight, eps: good.rms_norm(x + residual, weight, eps)},
        {"norm_rotate": lambda *of: good.norm_rotate(*of[:-1], None)},
        {"norm_rotate": lambda qkv, weight, cos, sin, *of: good.norm_rotate(qkv, weight, cos, -sin, *of)},
    ):
        ops = text_ops.choose(good, "gate", (lambda wrong=wrong: ("a package 1.0", wrong),), CPU, dtype)
        assert re.fullmatch(r"torch \(a package 1\.0 is \S+ off torch\)", ops.by["gate"])
    same = {"silu_mul": lambda x: good.silu_mul(x)}
    assert (
        text_ops.choose(good, "gate", (lambda: ("a package 1.0", same),), CPU, dtype).by["gate"]
        == "a package 1.0"
    )


def test_flashinfers_functions_are_called_as_they_are_declared(monkeypatch):
    """A fake FlashInfer binds each call to FlashInfer's recorded signature, and computes with torch."""
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
    ops = text_ops.choose(good, "norms", (text_ops.flashinfer_norms,), CPU, torch.float16)
    ops = text_ops.choose(ops, "gate", (text_ops.flashinfer_gate,), CPU, torch.float16)
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
    normed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_rotation_is_torchs(
    kernel_device, tokens, heads, kv_heads, half, block_size, dtype, cached, normed, seed
):
    """Rotate part of a wider matrix, with or without a norm and KV blocks.

    The results equal torch's. All other values in the matrix and in the KV slots keep their bits.
    """
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
        function(mine[:, :-1], weights if normed else None, cos, sin, 1e-6, heads, cache)
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


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 7, 40, 128, 1100]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 9),
)
def test_norms_and_gate_are_torchs(kernel_device, rows, width, dtype, seed):
    ours, torchs = text_ops.torch_ops(), text_ops.torch_ops()
    for make in (text_ops.our_norms, text_ops.our_gate):
        ours = replace(ours, **make()[1])
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, 2 * width, generator=generator).to(kernel_device, dtype)
    weight = torch.randn(2 * width, generator=generator).to(kernel_device, dtype)
    found = []
    for ops in (ours, torchs):
        kept = residual.clone()
        found.append((ops.rms_norm(x, weight, 1e-6), ops.add_norm(x.clone(), kept, weight, 1e-6), kept))
        found[-1] += (ops.silu_mul(x),)
    bound = 4 * torch.finfo(dtype).eps
    for mine, wanted in zip(*found, strict=True):
        assert mine.shape == wanted.shape and (mine - wanted).abs().max() <= bound * wanted.abs().max()
    assert torch.equal(found[0][2], found[1][2])  # x + residual, rounded once


def test_batch_invariance_uses_the_triton_kernels(kernel_device, dots_in_order):
    ops = text_ops.text_ops(kernel_device, torch.float16, batch_invariant=True)
    assert ops.batch_invariant and all(who.startswith("triton ") for who in ops.by.values())
    assert not text_ops.text_ops(kernel_device, torch.float16).batch_invariant


def test_where_a_kernel_does_not_run_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    says = r"needs the Triton kernels on cpu: matmuls by torch \(ModuleNotFoundError.*rotation by torch"
    with pytest.raises(ConfigError, match=says):
        text_ops.text_ops(CPU, torch.float16, batch_invariant=True)


@pytest.mark.parametrize("name", ["rms_norm", "add_norm", "silu_mul", "linear"])
def test_where_bits_depend_on_the_number_of_rows_it_is_refused(name, monkeypatch):
    """A fake kernel returns slightly larger values if there is more than one row."""
    good = text_ops.torch_ops()

    def off(x, *of):
        if name == "linear":
            return lambda rows: by_row(rows, x, *of) * (1 + (len(rows) > 1) * 2e-7)
        return by_row(x, *of) * (1 + (len(x) > 1) * 2e-7)

    def by_row(x, *of):
        """Compute with torch, row by row."""
        if name == "linear":
            return torch.cat([F.linear(row, *of) for row in x.split(1)])
        if name == "add_norm":
            parts = zip(x.split(1), of[0].split(1), strict=True)
            return torch.cat([good.add_norm(row, kept, *of[1:]) for row, kept in parts])
        return torch.cat([getattr(good, name)(row, *of) for row in x.split(1)])

    def ours():
        return "triton", {name: off}

    for other in ("our_matmuls", "our_norms", "our_gate", "our_rotation"):
        monkeypatch.setattr(text_ops, other, ours)
    with pytest.raises(ConfigError, match="a row's bits change with the other rows of the batch"):
        text_ops.text_ops(CPU, torch.float32, batch_invariant=True)
