"""Tests benchmarks/quantised/quantised.py with a small model. Times are not checked."""

import pytest
import torch

from mmengine import Engine
from mmengine.native import library
from tests.benchmarks.test_throughput import call

needs_kernels = pytest.mark.skipif(library.load() is None, reason="needs the compiled kernels")


@needs_kernels
def test_folders_are_read_as_what_they_are(module, tmp_path):
    """The engine holds an FP8 or int4 checkpoint's weights in the checkpoint's format."""
    plain, folders = tmp_path / "plain", module("quantised.folders")
    module("common.large_model").make(plain, None, small=True)
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scales = folders.fp8_blocks(weight)
    assert codes.shape == weight.shape and scales.shape == (2, 3)
    meant = codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert (meant - weight).norm() < 0.04 * weight.norm()
    sizes = {None: folders.weight_bytes(plain)}
    for form, said in (("fp8", "FP8"), ("int4", "int4")):
        folder = folders.quantised(plain, tmp_path / form, form)
        sizes[form] = folders.weight_bytes(folder)
        with Engine(folder, device="cpu", dtype="bfloat16") as engine:
            assert engine.built.spec.weights_held == said
            assert all(each.token_ids for each in engine.generate(["a b"], max_tokens=2))
    assert sizes[None] > sizes["fp8"] > sizes["int4"]


@pytest.mark.soak
@needs_kernels
def test_the_tables(tmp_path):
    printed = call("quantised", "--shape", "small", "--quick", "--out", tmp_path / "table.md")
    table = (tmp_path / "table.md").read_text()
    for text in ("small: loading", "small: steps, 1 thread", "| FP8 128 x 128 |", "int4 g 128: prompt"):
        assert text in table
    assert "Targets" in printed
