"""Tests that a Qwen3-VL mixture-of-experts model gives the same answers from GGUF files (qwen3vlmoe) as from
a checkpoint folder.
"""

import json

import numpy as np
import pytest

from mmengine import Engine
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from mmengine.models.registry import plugin_for
from tests.gguf.vision import (
    tensor_of,
    text_keys,
    text_tensors,
    vision_keys,
    vision_tensors,
    vocabulary_of,
    weights_of,
)
from tests.gguf.writing import UINT32, write
from tests.models.test_contract_qwen3_vl import TestQwen3VLMoe as Random
from tests.pictures import asked, noise

CHATS = (
    asked("What is it?"),
    asked(noise(1, (300, 260)), "What is in it?"),
    asked(noise(1, (300, 260)), noise(2, (256, 300)), "Which one?"),
)
LIMITS = {"shortest_edge": 65536, "longest_edge": 16777216}
MIXED = "model.language_model.layers."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    Random().make_checkpoint(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": LIMITS}))
    return folder


def experts_of(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the GGUF tensors for transformers' tensor `name`. transformers stores the gate and up matrices
    in a single tensor.
    """
    layer = name.removeprefix(MIXED).partition(".")[0]
    if name.endswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.weight": values}
    gate, up = np.split(values, 2, axis=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def write_files(folder, out, **more):
    """Write the text model's and the projector's files. `more`: metadata to add to the text model's file, or
    to replace there.
    """
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    text, tensors, plain = config["text_config"], [], {}
    for name, values in weights.items():
        if ".mlp.experts." in name:
            stacks = experts_of(name, values)
            tensors += [tensor_of(place, np.ascontiguousarray(each), "F32") for place, each in stacks.items()]
        elif name.endswith(".mlp.gate.weight"):
            layer = name.removeprefix(MIXED).partition(".")[0]
            tensors.append(tensor_of(f"blk.{layer}.ffn_gate_inp.weight", values, "F32"))
        else:
            plain[name] = values
    keys = {
        "expert_count": (UINT32, text["num_local_experts"]),
        "expert_used_count": (UINT32, text["num_experts_per_tok"]),
        "expert_feed_forward_length": (UINT32, text["moe_intermediate_size"]),
    } | more
    metadata = text_keys(config, architecture="qwen3vlmoe", **keys)
    model = out / "model-F32.gguf"
    model.write_bytes(write(metadata + vocabulary_of(folder), tensors + text_tensors(plain, "F32")).data)
    towers = vision_tensors(weights, config, "F32")
    (out / "mmproj-F32.gguf").write_bytes(write(vision_keys(config), towers).data)
    return model


def answers(model):
    with Engine(model, device="cpu", dtype="float32") as engine:
        outputs = engine.generate(list(CHATS), max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        return [(each.token_ids, each.choices[0].logprobs) for each in outputs]


def test_the_files_answer_like_the_folder(folder, tmp_path):
    model = write_files(folder, tmp_path)
    assert GGUFModel(model).file("config.json")["architectures"] == ["Qwen3VLMoeForConditionalGeneration"]
    assert plugin_for(model) is plugin_for(folder)
    assert answers(model) == answers(folder)


def test_a_projector_with_other_deepstack_layers_is_refused(folder, tmp_path):
    model = write_files(folder, tmp_path, n_deepstack_layers=(UINT32, 1))
    with pytest.raises(ModelError, match="n_deepstack_layers is 1, but .* has 2 deepstack layers"):
        plugin_for(model).read_config(model)


def test_without_a_projector_it_is_a_text_model(folder, tmp_path):
    model = write_files(folder, tmp_path)
    (tmp_path / "mmproj-F32.gguf").unlink()
    assert GGUFModel(model).file("config.json")["architectures"] == ["Qwen3MoeForCausalLM"]
    with Engine(model, device="cpu", dtype="float32") as engine:
        (answer,) = engine.generate([CHATS[0]], max_tokens=6, temperature=0, ignore_eos=True)
        assert answer.token_ids == answers(folder)[0][0]
