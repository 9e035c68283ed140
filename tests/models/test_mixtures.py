"""Tests reading, sharding and computing mixtures of experts. The experts are separate, stacked, transposed or
in FP8.
"""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine import Engine
from mmengine.checkpoint.stacked_experts import each_expert
from mmengine.errors import ConfigError, ModelError
from mmengine.gpu.text_ops import torch_ops
from mmengine.models.decoder.fused_text import FusedTextDecoder
from mmengine.models.decoder.sharding import axis_of
from mmengine.models.decoder.tensors import decoder_tensors
from mmengine.models.network import Network, text_decoder
from mmengine.models.reader import open_reader
from mmengine.models.sharding import Shard
from mmengine.models.weights import open_weights
from mmengine_llama import plugin
from mmengine_llama.config import NAMES, read_config
from tests.llama.tiny import make_tiny
from tests.models.fp8_folder import plain as dequantised
from tests.models.fp8_folder import quantised, to_fp8
from tests.models.stacked_folder import stacked
from tests.models.text_reference import (
    EXPERTS,
    Kind,
    make_prompts,
    make_reference,
    reference_logits,
    run_prompts,
)
from tests.qwen3_vl.qwen3_vl_reference import DenseAttention

KIND = Kind("Qwen3Moe", EXPERTS | {"norm_topk_prob": True})
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return folder, make_reference(folder, KIND, seed=8)


def rewritten(folder, out, change):
    shutil.copytree(folder, out)
    save_file(change(load_file(folder / "model.safetensors")), out / "model.safetensors", {"format": "pt"})
    return out


def in_stacks(turned):
    return partial(stacked, count=EXPERTS["num_experts"], turned=turned)


def read(folder, shard=None, dtype=torch.float32, piece=None):
    """Return the model's tensors by canonical name. `piece`: maximum number of values per read."""
    config = read_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr("mmengine.models.reader.PIECE_VALUES", piece)
        with open_weights(folder, NAMES, config, CPU, dtype, shard) as weights:
            return {name: weights.read(name) for name in decoder_tensors(config.text)}


@pytest.mark.parametrize("turned", (False, True))
def test_stacked_experts_equal_separate_ones(made, tmp_path, turned):
    folder = rewritten(made[0], tmp_path / "stacked", in_stacks(turned))
    wanted = read(made[0])
    for piece in (None, 200):
        for name, value in read(folder, piece=piece).items():
            assert torch.equal(value, wanted[name]), name
    for rank in range(2):
        for name, value in read(folder, Shard(rank, 2, None), piece=200).items():
            axis = axis_of(name)
            part = wanted[name] if axis is None else wanted[name].chunk(2, axis)[rank]
            assert torch.equal(value, part), name
    assert plugin.fingerprint(folder) != plugin.fingerprint(made[0])


def test_a_stack_of_another_shape_is_refused(made, tmp_path):
    def change(tensors):
        found = in_stacks(False)(tensors)
        name = "model.layers.2.mlp.experts.down_proj"
        return found | {name: found[name][:, :, 1:].contiguous()}

    folder = rewritten(made[0], tmp_path / "stacked", change)
    asked = r"experts.down_proj has shape \[8, 48, 31\]; config.json requires \[8, 48, 32\], or \[8, 32, 48\]"
    with pytest.raises(ModelError, match=asked):
        read(folder)


@pytest.mark.parametrize("native", (False, True))
def test_fp8_experts_equal_the_dequantised_model(made, tmp_path, native, monkeypatch):
    folder, plain = tmp_path / "fp8", tmp_path / "plain"
    shutil.copytree(made[0], folder)
    shutil.copytree(made[0], plain)
    meant = to_fp8(folder, block=(24, 32))
    rounded = {name: value.bfloat16() for name, value in meant.items()}
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    if not native:
        monkeypatch.setattr("mmengine.models.network.native.load", lambda: None)
        monkeypatch.setattr("mmengine.models.reader.native.load", lambda: None)
    models = [plugin.load_model(each, device="cpu", dtype="bfloat16") for each in (folder, plain)]
    assert [model.spec.weights_held for model in models] == [
        ("FP8" if native else "FP8 held as bfloat16"),
        "",
    ]
    prompts = make_prompts(9)
    steps = [[(row, len(ids)) for row, ids in enumerate(prompts)]]
    found, wanted = (run_prompts(model, prompts, steps, DenseAttention()) for model in models)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("turned", (False, True))
def test_stacked_fp8_experts_equal_separate_ones(made, tmp_path, turned):
    """Qwen3-VL-30B-A3B-Instruct-FP8 has transposed experts in FP8."""
    shutil.copytree(made[0], tmp_path / "alone")
    to_fp8(tmp_path / "alone", block=(32, 32))  # 48 columns are not a multiple of 32.
    folder = rewritten(tmp_path / "alone", tmp_path / "stacked", in_stacks(turned))
    shapes = {name: list(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
    scale = shapes["model.layers.2.mlp.experts.gate_up_proj_scale_inv"]
    assert scale == [8, 2, 2] and not any(".experts.0." in name for name in shapes)
    wanted = read(tmp_path / "alone")
    for piece in (None, 200):
        for name, value in read(folder, piece=piece).items():
            assert torch.equal(value, wanted[name]), name
    for rank in range(2):
        alone, found = (read(each, Shard(rank, 2, None), piece=200) for each in (tmp_path / "alone", folder))
        for name, value in found.items():
            assert torch.equal(value, alone[name]), name
    held = [plugin.load_model(each, device="cpu", dtype="bfloat16") for each in (tmp_path / "alone", folder)]
    assert held[0].spec.weights_held == held[1].spec.weights_held
    prompts = make_prompts(9)
    steps = [[(row, len(ids)) for row, ids in enumerate(prompts)]]
    assert all(map(torch.equal, *(run_prompts(model, prompts, steps, DenseAttention()) for model in held)))


def test_answers_of_stacked_experts_in_fp8(tmp_path):
    (tmp_path / "alone").mkdir()
    make_tiny(tmp_path / "alone", "Qwen3Moe")
    to_fp8(tmp_path / "alone", block=(32, 32))
    folder = rewritten(tmp_path / "alone", tmp_path / "stacked", in_stacks(True))
    for dtype in ("float32", "bfloat16"):
        said = []
        for each in (tmp_path / "alone", folder):
            with Engine(each, device="cpu", dtype=dtype) as engine:
                said.append([one.token_ids for one in engine.generate(["a b", "b c d"], max_tokens=8)])
        assert said[0] == said[1] and all(said[0])


def test_blocks_of_turned_experts_are_turned_too(tmp_path):
    """A scale block of 16 rows and 24 columns has 24 rows and 16 columns in the stored, transposed matrix."""
    drawn = torch.randn(3, 64, 36, generator=torch.Generator().manual_seed(0))
    each = [quantised(one, (16, 24)) for one in drawn]
    gate_up = {
        "a.experts.gate_up_proj": torch.stack([codes.T for codes, _ in each]).contiguous(),
        "a.experts.gate_up_proj_scale_inv": torch.stack([scales.T for _, scales in each]).contiguous(),
    }
    save_file(gate_up, tmp_path / "model.safetensors")
    how = {"quant_method": "fp8", "weight_block_size": [24, 16]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    found = each_expert(NAMES.entries(tmp_path), 3, 36, 32)
    with open_reader(found, CPU, torch.float32) as weights:
        for i, (codes, scales) in enumerate(each):
            both = weights.read(*(f"a.experts.{i}.{part}_proj.weight" for part in ("gate", "up")))
            assert torch.equal(both, dequantised(codes, scales, (16, 24)))


@pytest.mark.parametrize("turned", (False, True))
def test_gate_and_up_that_share_a_scale_are_refused_by_name(made, tmp_path, turned):
    folder = rewritten(made[0], tmp_path / "model", in_stacks(turned))
    how = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(8, *(-(-size // 24) for size in tensors[name].shape[1:]))
    save_file(tensors, folder / "model.safetensors")
    said = r"experts.gate_up_proj has gate and up of 32 rows each, which share a scale in blocks of 24"
    with pytest.raises(ModelError, match=said):
        read(folder)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_ranks_add_up_to_the_whole_model(made, dtype):
    """In each layer, the sum of two ranks' feed-forward outputs equals the unsharded output."""

    def part(rank, size):
        shard = Shard(rank, size, lambda x: x)
        return plugin.load_model(made[0], device="cpu", dtype=dtype, shard=shard)._text._feed_forwards

    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    with torch.inference_mode():
        for whole, first, second in zip(part(0, 1), part(0, 2), part(1, 2), strict=True):
            wanted, found = whole(x).float(), first(x).float() + second(x).float()
            off = (found - wanted).abs().max() / wanted.abs().max()
            assert off < (1e-5 if dtype == "float32" else 0.02)


def test_experts_that_cannot_be_cut_are_refused(made, tmp_path):
    folder = rewritten(made[0], tmp_path / "model", dict)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 25}))
    with pytest.raises(ConfigError, match="cannot cut 25 intermediate values of an expert"):
        plugin.load_model(folder, device="cpu", dtype="float32", shard=Shard(0, 2, None))


def test_the_decoder_of_gpus_computes_the_same(made):
    """The GPU decoder's logits equal transformers'. The test runs on a CPU with torch operations in place of
    GPU kernels.
    """
    folder, reference = made
    config = read_config(folder)
    with open_weights(folder, NAMES, config, CPU, torch.float32) as weights:
        fused = FusedTextDecoder(config.text, weights, CPU, torch_ops())
    model, prompts = Network(config, fused, None, CPU, torch.float32), make_prompts(12)
    steps = [[(row, len(ids)) for row, ids in enumerate(prompts)]]
    for ids, found in zip(prompts, run_prompts(model, prompts, steps, DenseAttention()), strict=True):
        assert np.allclose(found, reference_logits(reference, ids), atol=1e-4)
    with pytest.raises(ConfigError, match="batch_invariant is not supported for experts on a GPU"):
        text_decoder(config.text, weights, torch.device("meta"), torch.bfloat16, batch_invariant=True)


def test_logits_without_kernels_are_transformers(made, monkeypatch):
    folder, reference = made
    monkeypatch.setattr("mmengine.models.network.native.load", lambda: None)
    model, prompts = plugin.load_model(folder, device="cpu", dtype="float32"), make_prompts(11)
    steps = [[(row, len(ids)) for row, ids in enumerate(prompts)]]
    for ids, found in zip(prompts, run_prompts(model, prompts, steps, DenseAttention()), strict=True):
        assert np.allclose(found, reference_logits(reference, ids), atol=1e-4)
