"""Tests how Qwen3.5's experts are loaded: from separate, stacked or FP8 tensors, and quantised to int8."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine.config import EngineConfig
from mmengine.models.weights import open_weights
from mmengine.serve.engine.engine import Engine
from mmengine_qwen3_5 import plugin
from mmengine_qwen3_5.config import read_config
from mmengine_qwen3_5.names import NAMES
from tests.models.fp8_folder import to_fp8
from tests.models.stacked_folder import stacked
from tests.qwen3_5.tiny import MIXTURE, make_text

PROMPTS = ("Hello there", "Two cats sat on a mat. " * 4)
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_text(folder, mixture=True)
    return folder


def rewritten(folder, out, change):
    shutil.copytree(folder, out)
    save_file(change(load_file(folder / FILE)), out / FILE, {"format": "pt"})
    return out


def scores(folder, **settings):
    """Return a bfloat16 engine's tokens and log-probabilities for each prompt."""
    sizes = {"num_blocks": 257, "max_model_len": 256, "num_threads": 1, "spec": "none"}
    config = EngineConfig.from_dict(sizes | settings)
    with Engine(folder, device="cpu", dtype="bfloat16", config=config) as engine:
        found = engine.generate(list(PROMPTS), max_tokens=8, ignore_eos=True, logprobs=2)
        return [(each.token_ids, each.choices[0].logprobs) for each in found]


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_experts_equal_separate_ones(made, tmp_path, turned):
    """`turned`: whether the stacked matrices are transposed. The stacked file also contains a draft head's
    tensor, which the loader ignores.
    """

    def change(tensors):
        found = stacked(tensors, MIXTURE["num_experts"], turned=turned)
        return found | {"mtp.layers.0.mlp.experts.down_proj": torch.zeros(8, 48, 32)}

    folder = rewritten(made, tmp_path / "stacked", change)
    names = set(load_file(folder / FILE))
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any(".experts.0." in name for name in names)
    config, cpu = read_config(made), torch.device("cpu")
    both = [open_weights(each, NAMES, config, cpu, torch.float32) for each in (made, folder)]
    with both[0] as alone, both[1] as together:
        for i in range(config.text.num_layers):
            for expert in range(MIXTURE["num_experts"]):
                for part in ("gate", "up", "down"):
                    name = f"text.layers.{i}.mlp.experts.{expert}.{part}_proj.weight"
                    assert torch.equal(alone.read(name), together.read(name))


def test_fp8_experts_equal_the_dequantised_model(made, tmp_path):
    folder = tmp_path / "fp8"
    shutil.copytree(made, folder)
    meant = to_fp8(folder, block=(48, 64))
    stored = load_file(folder / FILE)
    for part in ("mlp.experts.7.down_proj", "mlp.shared_expert.up_proj", "linear_attn.in_proj_qkv"):
        assert f"model.layers.0.{part}.weight_scale_inv" in stored
    assert stored["model.layers.0.linear_attn.in_proj_b.weight"].dtype == torch.float32
    rounded = {name: value.bfloat16() for name, value in meant.items()}
    plain = rewritten(made, tmp_path / "plain", lambda _: rounded)
    assert plugin.load_model(folder, device="cpu", dtype="bfloat16").spec.weights_held.startswith("FP8")
    assert scores(folder) == scores(plain)


def test_experts_become_int8_as_they_are_loaded(made):
    model = plugin.load_model(made, device="cpu", dtype="bfloat16", quantize="int8")
    assert model.spec.weights_held == "int8"
    plain, found = scores(made), scores(made, quantize="int8")
    off = [
        abs(score - other)
        for (_, first), (_, second) in zip(plain, found, strict=True)
        for (_, score), (_, other) in zip(first[0], second[0], strict=True)
    ]
    assert 0 < np.median(off) < 0.5
