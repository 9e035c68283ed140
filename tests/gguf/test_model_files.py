"""Tests that a checkpoint folder and a GGUF file give the same config, prompts and weights."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mmengine.checkpoint.fingerprint import fingerprint
from mmengine.checkpoint.model_files import (
    has_model_file,
    is_gguf,
    model_file,
    model_tensors,
    read_model_json,
)
from mmengine.checkpoint.names import TensorNames
from mmengine.checkpoint.tensors import check_tensors
from mmengine.errors import ModelError
from mmengine.processing.chat.template import ChatTemplate
from mmengine.processing.chat.tokens import ChatTokenizer
from mmengine.processing.description import read_generation
from tests.gguf.writing import ARRAY, STRING, model, vocabulary, weights, write

TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def both(tmp_path):
    """Return a GGUF file, and a folder with the same config, tokenizer and weights."""
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    path.write_bytes(write(model("qwen3") + vocabulary(), weights("F32")).data)
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps(read_model_json(path, name)))
    values = {
        name: np.concatenate([values for _, values in entry.pieces(0, entry.shape[0])])
        for name, entry in model_tensors(path, lambda name: name).items()
    }
    save_file(values, folder / "model.safetensors")
    return path, folder


def test_folder_and_gguf_file_agree(both):
    path, folder = both
    assert is_gguf(path) and not is_gguf(folder) and not is_gguf(path.with_name("none.gguf"))
    for name in ("config.json", "tokenizer.json"):
        assert has_model_file(path, name) and has_model_file(folder, name)
        assert json.dumps(read_model_json(path, name)) == json.dumps(read_model_json(folder, name))
    assert has_model_file(path, "tokenizer_config.json") and not has_model_file(
        folder, "tokenizer_config.json"
    )
    assert not has_model_file(path, "preprocessor_config.json")

    def canonical(name):
        return None if name.endswith("norm.weight") else name.replace("model.", "text.", 1)

    here, there = (model_tensors(each, canonical) for each in both)
    assert here.keys() == there.keys() and "text.layers.1.self_attn.q_proj.weight" in here
    for name, entry in here.items():
        assert (entry.shape, entry.dtype, entry.num_bytes) == (
            there[name].shape,
            there[name].dtype,
            there[name].num_bytes,
        )


def small(path, **more):
    path.write_bytes(write(model() + vocabulary(**more), weights()).data)
    return path


def test_prompts_are_equal_from_a_folder_and_a_gguf_file(both, tmp_path):
    _, folder = both
    with_template = write(model() + [("tokenizer.chat_template", STRING, TEMPLATE)] + vocabulary(), weights())
    path = tmp_path / "chat.gguf"
    path.write_bytes(with_template.data)
    tokenizer = ChatTokenizer.of_folder(path)
    assert tokenizer.digest == ChatTokenizer.of_folder(folder).digest
    assert tokenizer.decode(tokenizer.encode("hello <|end|>")) == "hello <|end|>"
    template = ChatTemplate.of_folder(path, tokenizer)
    rendered = template.render(
        [{"role": "user", "content": "hell <|end|>"}],
        add_generation_prompt=False,
        continue_final_message=False,
    )
    assert template.split(rendered) == [0, "hell <|end|>", 1]
    assert read_generation(path) == {"eos_token_id": [1]} and read_generation(folder) == {}
    assert model_file(path, "config.json") == path and model_file(folder, "a") == folder / "a"


def test_a_file_without_a_template_or_an_end(tmp_path):
    path = small(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model.gguf has no chat template \(tokenizer.chat_template\)"):
        ChatTemplate.of_folder(path, ChatTokenizer.of_folder(path))
    tokens = {key: value for key, _, value in vocabulary()}["tokenizer.ggml.tokens"]
    again = (ARRAY, (STRING, [*tokens[1][:-3], "hell", "<think>", "<think>"]))
    with pytest.raises(ModelError, match="model.gguf: tokenizer.ggml.tokens has a token twice"):
        ChatTokenizer.of_folder(small(path, tokens=again))
    without = [entry for entry in vocabulary() if not entry[0].endswith("eos_token_id")]
    path.write_bytes(write(model() + without, weights()).data)
    with pytest.raises(ModelError, match="eos_token_id is missing; nothing would end an answer"):
        read_generation(path)


def test_weights_by_canonical_names(both, tmp_path):
    names = TensorNames(())
    here, there = (names.entries(each) for each in both)
    assert here.keys() == there.keys() and len(here) == 20
    packed, other = small(tmp_path / "packed.gguf"), small(tmp_path / "other.gguf")
    assert fingerprint(packed, names) == fingerprint(other, names) != fingerprint(both[0], names)
    data = bytearray(other.read_bytes())
    entry = names.entries(other)["model.layers.1.mlp.down_proj.weight"]
    data[entry.start] ^= 1
    other.write_bytes(data)
    assert fingerprint(packed, names) != fingerprint(other, names)
    shapes = {name: entry.shape for name, entry in here.items()}
    check_tensors(both[0], here, shapes)
    with pytest.raises(ModelError, match=r"shape \[64\]; its metadata requires \[65\]"):
        check_tensors(both[0], here, shapes | {"model.norm.weight": (65,)})
    del shapes["model.norm.weight"]
    with pytest.raises(ModelError, match="output_norm.weight does not belong to the model that its metadata"):
        check_tensors(both[0], here, shapes)


def test_a_missing_file_is_named(both):
    _, folder = both
    with pytest.raises(ModelError, match="cannot read .*generation_config.json"):
        read_model_json(folder, "generation_config.json")
