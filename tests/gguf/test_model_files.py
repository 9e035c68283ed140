"""A model's files are asked for alike, whether it is a folder or a GGUF file."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mmengine.checkpoint.model_files import has_model_file, is_gguf, model_tensors, read_model_json
from mmengine.errors import ModelError
from tests.gguf.writing import model, vocabulary, weights, write


@pytest.fixture
def both(tmp_path):
    """A GGUF file, and a folder of the same words and names."""
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


def test_both_say_the_same(both):
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


def test_what_is_missing(both):
    _, folder = both
    with pytest.raises(ModelError, match="cannot read .*generation_config.json"):
        read_model_json(folder, "generation_config.json")
