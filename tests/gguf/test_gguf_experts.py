"""Tests a mixture of experts in a GGUF file, which stacks experts, against a folder with the same weights."""

import json

import numpy as np
import pytest

from mmengine import Engine
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.errors import ModelError
from tests.gguf.vision import LAYER, tensor_of, weights_of
from tests.gguf.writing import STRING, UINT32, model, vocabulary, write
from tests.models.text_reference import EXPERTS, Kind, make_reference

SIZES = {"vocab_size": 263, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
MORE = {"num_hidden_layers": 2, "norm_topk_prob": True, "bos_token_id": 0, "eos_token_id": 1}
PLACES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}<|start|>"


def tensors_of(folder, kind="F32", count=EXPERTS["num_experts"]):
    """Return the tensors of a Qwen3 mixture, with the experts of each layer stacked."""
    stacks, found = {}, []
    for name, values in weights_of(folder).items():
        stem, _, ending = name.rpartition(".")
        if ".mlp.experts." in stem:
            layer, _, rest = stem.removeprefix("model.layers.").partition(".mlp.experts.")
            index, _, part = rest.partition(".")
            stacks.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps", {})[int(index)] = values
        elif stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            place = "ffn_gate_inp" if part == "mlp.gate" else LAYER[part]
            found.append(
                tensor_of(f"blk.{layer}.{place}.{ending}", values, "F32" if part == "mlp.gate" else kind)
            )
        else:
            found.append(tensor_of(f"{PLACES[stem]}.{ending}", values, kind))
    for name, each in stacks.items():
        found.append(tensor_of(f"{name}.weight", np.stack([each[place % 8] for place in range(count)]), kind))
    return found


def metadata(**more):
    keys = {
        "attention.key_length": (UINT32, 16),
        "attention.layer_norm_rms_epsilon": (6, 1e-6),
        "rope.freq_base": (6, 10000.0),
        "expert_count": (UINT32, 8),
        "expert_used_count": (UINT32, 3),
        "expert_feed_forward_length": (UINT32, 32),
    } | more
    return model("qwen3moe", **keys) + vocabulary() + [("tokenizer.chat_template", STRING, TEMPLATE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    make_reference(folder, Kind("Qwen3Moe", EXPERTS | SIZES | MORE))
    path = folder / "words.gguf"
    path.write_bytes(write(metadata()).data)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(GGUFModel(path).file(name)))
    return folder


def answers(name, impl="auto"):
    with Engine(name, device="cpu", dtype="float32", model_impl=impl) as engine:
        found = engine.generate(["hell", "he"], max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
        return [(each.token_ids, each.choices[0].logprobs) for each in found]


def test_stacked_experts_answer_like_the_folder(folder, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write(metadata(), tensors_of(folder)).data)
    assert GGUFModel(path).file("config.json")["mlp_only_layers"] == [1]
    assert answers(path) == answers(folder)


def test_transformers_modules_read_the_file(folder, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write(metadata(), tensors_of(folder)).data)
    found, expected = answers(path, "transformers"), answers(folder)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_quantised_experts_answer(folder, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(write(metadata(), tensors_of(folder, "Q8_0")).data)
    assert all(len(tokens) == 8 for tokens, _ in answers(path))


def test_wrong_numbers_of_experts_are_refused(folder, tmp_path):
    path = tmp_path / "model.gguf"
    for count, said in (
        (9, "does not belong"),
        (7, "no tensor .*experts.7"),
        (1025, "1025 experts, which are too"),
    ):
        path.write_bytes(write(metadata(), tensors_of(folder, count=count)).data)
        with pytest.raises(ModelError, match=said):
            Engine(path, device="cpu", dtype="float32")
    path.write_bytes(write(metadata(expert_count=(UINT32, 2**31)), tensors_of(folder)).data)
    with pytest.raises(ModelError, match="expert_count is 2147483648; it must be an integer from 1 to 1024"):
        Engine(path, device="cpu", dtype="float32")
