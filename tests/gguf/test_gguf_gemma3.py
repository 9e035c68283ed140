"""Tests Gemma 3 as GGUF files against safetensors folders with the same weights. In both cases, the engine
runs transformers' modules.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine import Engine
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.gguf.pair import pair
from mmengine.checkpoint.model_files import model_note
from mmengine.errors import ModelError
from mmengine.models.registry import plugin_for
from mmengine_transformers import plugin
from mmengine_transformers.packed import PackedEmbedding, packed_embedding
from tests.any_model.catalogue import write
from tests.gguf.hosted import gemma_keys, write_gemma
from tests.gguf.vision import package_reader, vocabulary_of, weights_of
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, STRING, UINT32
from tests.gguf.writing import write as write_gguf
from tests.pictures import asked, noise

CHATS = (
    asked("What is the time, and where does this long question end?"),
    asked(noise(0, (60, 90)), "What is in it?"),
    asked("Between ", noise(1, (90, 58)), " and ", noise(2, (48, 63)), ", which one?"),
)
# The tiny models have windows in the first and the third layer of four.
WINDOWS = {"attention.sliding_window_pattern": (ARRAY, (BOOL, [True, False, True, False]))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gemma3")
    for kind in ("gemma3_text", "gemma3"):
        write(kind, root / kind)
    return root


def answers(model, chats):
    """Return the tokens and log-probabilities of greedy answers."""
    with Engine(model, device="cpu", dtype="float32", num_threads=1) as engine:
        outputs = engine.generate(list(chats), max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        return [(each.token_ids, each.choices[0].logprobs) for each in outputs]


def near(found, expected):
    """Assert equal tokens, and log-probabilities within 1e-4."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        for got, wanted in zip(mine, theirs, strict=True):
            assert [value for _, value in got] == pytest.approx([value for _, value in wanted], abs=1e-4)


def test_a_text_model_answers_like_its_folder(folders, tmp_path):
    model = write_gemma(folders / "gemma3_text", tmp_path, keys=WINDOWS)
    assert plugin_for(model) is plugin
    near(answers(model, CHATS[:1]), answers(folders / "gemma3_text", CHATS[:1]))


@pytest.fixture(scope="module")
def expected(folders):
    return answers(folders / "gemma3", CHATS)


@pytest.mark.parametrize("swaps", [False, True])
def test_a_pair_answers_like_its_folder(folders, expected, tmp_path, swaps):
    """Images and attention windows affect these answers."""
    model = write_gemma(folders / "gemma3", tmp_path, swaps=swaps, keys=WINDOWS)
    near(answers(model, CHATS), expected)
    assert model_note(model) == "projector mmproj-F32.gguf: an image becomes 4 tokens"


def test_a_model_without_its_projector_reads_text(folders, expected, tmp_path):
    model = write_gemma(folders / "gemma3", tmp_path, keys=WINDOWS)
    near(answers(pair(model, "none"), CHATS[:1]), expected[:1])


def test_matrices_stay_as_stored(folders, tmp_path):
    model = write_gemma(folders / "gemma3_text", tmp_path, "Q8_0", keys=WINDOWS)
    held = plugin.load_model(model, device="cpu", dtype="float32").spec.weights_held
    assert held.startswith("Q8_0 held as codes") or "int8" in held  # AVX-512 holds Q8_0 as int8.


@pytest.fixture(scope="module")
def tied(folders):
    """Return a text model with tied embeddings, as in all published Gemma 3 models."""
    folder = folders / "tied"
    shutil.copytree(folders / "gemma3_text", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_tied_embedding_is_in_memory_once(tied, tmp_path):
    """Gemma's embedding is its output matrix times a factor."""
    model = write_gemma(tied, tmp_path, "Q8_0", keys=WINDOWS)
    network = plugin.load_model(model, device="cpu", dtype="float32")
    assert type(network._parts.model.get_input_embeddings()) is PackedEmbedding
    held = re.search(r"held as codes.* in ([\d.]+) MB", network.spec.weights_held)
    if held is not None:  # With AVX-512, the matrices are held as int8, and no number is printed.
        assert float(held[1]) * 1e6 < 1.3 * model.stat().st_size
    near(answers(write_gemma(tied, tmp_path, keys=WINDOWS), CHATS[:1]), answers(tied, CHATS[:1]))


def test_an_embedding_that_computes_something_else_stays(tied):
    class Shifted(torch.nn.Embedding):
        embed_scale = torch.tensor(2.0)

        def forward(self, ids):
            return super().forward(ids) * self.embed_scale + 1

    network = plugin.load_model(tied, device="cpu", dtype="float32")
    head = network._parts.model.get_output_embeddings()
    rows = torch.eye(64)[torch.arange(320) % 64]
    assert packed_embedding(Shifted.from_pretrained(rows), head) is None
    assert packed_embedding(torch.nn.Linear(64, 64), head) is None


def test_norms_are_stored_with_one_added(folders, tmp_path):
    model = write_gemma(folders / "gemma3", tmp_path)
    found, theirs = GGUFModel(model).tensors(str), weights_of(folders / "gemma3")
    assert found.keys() == {name for name in theirs if ".head." not in name}
    for name, entry in found.items():
        values = np.concatenate([rows for _, rows in entry.pieces(0, entry.shape[0])])
        assert np.array_equal(values.reshape(theirs[name].shape), theirs[name]) or "norm" in name
        assert np.allclose(values.reshape(theirs[name].shape), theirs[name], atol=1e-6)


def config_of(folders, out, **keys):
    return GGUFModel(write_gemma(folders / "gemma3_text", out, keys=keys)).file("config.json")


def test_windows_and_rotary_embeddings_of_layers(folders, tmp_path):
    rope = {"rope_theta": 1000000.0, "rope_type": "default"}
    plain = config_of(folders, tmp_path)
    # By default, every sixth layer has full attention, and this model has only four layers.
    assert plain["layer_types"] == ["sliding_attention"] * 4
    local = {"rope_theta": 10000.0, "rope_type": "default"}
    assert plain["rope_parameters"] == {"full_attention": rope, "sliding_attention": local}
    assert plain["query_pre_attn_scalar"] == 16
    scaled = config_of(
        folders,
        tmp_path,
        **{
            "attention.sliding_window_pattern": (UINT32, 2),
            "rope.scaling.type": (STRING, "linear"),
            "rope.scaling.factor": (FLOAT32, 8.0),
            "rope.freq_base_swa": (FLOAT32, 5000.0),
        },
    )
    assert scaled["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert scaled["rope_parameters"]["full_attention"] == rope | {"rope_type": "linear", "factor": 8.0}
    assert scaled["rope_parameters"]["sliding_attention"] == local | {"rope_theta": 5000.0}


def test_a_file_without_a_window_has_none(folders, tmp_path):
    text = json.loads((folders / "gemma3_text" / "config.json").read_text())
    keys = [key for key in gemma_keys(text) if not key[0].endswith("sliding_window")]
    model = write_gemma(folders / "gemma3_text", tmp_path)
    words = [*vocabulary_of(folders / "gemma3_text", "gpt-2"), ("tokenizer.ggml.bos_token_id", UINT32, 1)]
    model.write_bytes(write_gguf(keys + words, []).data)
    found = GGUFModel(model).file("config.json")
    assert found["layer_types"] == ["full_attention"] * 4 and found["sliding_window"] is None


def test_the_attention_scale_of_the_largest_model_depends_on_its_hidden_size(folders, tmp_path):
    assert config_of(folders, tmp_path, block_count=(UINT32, 62))["query_pre_attn_scalar"] == 64 // 4
    wide = {"attention.key_length": (UINT32, 32), "attention.value_length": (UINT32, 32)}
    assert config_of(folders, tmp_path, **wide)["query_pre_attn_scalar"] == 32
    assert config_of(folders, tmp_path, block_count=(UINT32, 62), **wide)["query_pre_attn_scalar"] == 16


def test_wrong_files_are_refused(folders, tmp_path):
    text = (
        ({"attention.sliding_window": (UINT32, 0)}, "attention.sliding_window is 0; it must be"),
        ({"attention.sliding_window_pattern": (ARRAY, (BOOL, [True]))}, "an array of 1; 4 truth values are"),
        (
            {"attn_logit_softcapping": (FLOAT32, 50.0)},
            "attn_logit_softcapping is 50.0, which is not supported",
        ),
    )
    for keys, said in text:
        with pytest.raises(ModelError, match=said):
            config_of(folders, tmp_path, **keys)
    vision = (
        ({"projector.scale_factor": (UINT32, 3)}, "image_size is 56, not a multiple of 3 patches of 14"),
        ({"projection_dim": (UINT32, 80)}, "projects to 80 values, but model-F32.gguf .* of 64: it is the"),
    )
    for keys, said in vision:
        name = pair(write_gemma(folders / "gemma3", tmp_path, vision=keys), tmp_path / "mmproj-F32.gguf")
        with pytest.raises(ModelError, match=said):
            plugin_for(Path(name)).load_processor(Path(name))


def test_the_written_files_are_those_of_the_gguf_package(folders, tmp_path):
    model = write_gemma(folders / "gemma3", tmp_path)
    for path in (model, tmp_path / "mmproj-F32.gguf"):
        package_reader(path)
