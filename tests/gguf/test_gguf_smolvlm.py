"""Tests that SmolVLM2's GGUF files (a llama text model and an idefics3 projector) answer like a safetensors
folder with the same weights.
"""

import json

import numpy as np
import pytest

from mmengine import Engine
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.gguf.pair import pair
from mmengine.checkpoint.model_files import model_note
from mmengine.errors import ModelError
from mmengine.models.registry import plugin_for
from tests.gguf.vision import (
    LAYER,
    SIGLIP,
    clip_keys,
    decoder_keys,
    tensor_of,
    tower_name,
    vocabulary_of,
    weights_of,
)
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, UINT32, Tensor, write
from tests.pictures import asked, noise
from tests.smolvlm.tiny import SCALE, SIDE, make_tiny

PLACES = {
    "vision_model.embeddings.patch_embedding": "v.patch_embd",
    "vision_model.embeddings.position_embedding": "v.position_embd",
    "vision_model.post_layernorm": "v.post_ln",
    "connector.modality_projection.proj": "mm.model.fc",
    "text_model.embed_tokens": "token_embd",
    "text_model.norm": "output_norm",
    "lm_head": "output",
}
CHATS = (
    asked("What is the time?"),
    asked(noise(0, (30, 96)), "What is in it?"),
    asked("Between ", noise(1, (90, 28)), " and ", noise(2, (20, 63)), ", which one?"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smolvlm")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return answers(folder)


def answers(model):
    """Return the tokens and log-probabilities of greedy answers to CHATS."""
    with Engine(model, device="cpu", dtype="float32") as engine:
        outputs = engine.generate(list(CHATS), max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        return [(each.token_ids, each.choices[0].logprobs) for each in outputs]


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k as GGUF files with the architecture llama store them."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def tensors_of(folder, swaps: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors for the text model and for the projector."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    heads = {"attn_q": text["num_attention_heads"], "attn_k": text["num_key_value_heads"]}
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for name, values in weights_of(folder).items():
        stem, _, ending = name.removeprefix("model.").rpartition(".")
        if stem.startswith("text_model.layers."):
            _, _, layer, part = stem.split(".", 3)
            values = in_pairs(values, heads[LAYER[part]]) if LAYER[part] in heads else values
            found[0].append(tensor_of(f"blk.{layer}.{LAYER[part]}.{ending}", values, "F32"))
        elif stem.startswith("vision_model.encoder.layers."):
            _, _, _, layer, part = stem.split(".", 4)
            place = tower_name(layer, SIGLIP[part], swaps)
            found[1].append(tensor_of(f"{place}.{ending}", values, "F32"))
        else:
            place = PLACES[stem]
            found[place.startswith(("v.", "mm."))].append(tensor_of(f"{place}.{ending}", values, "F32"))
    return found


def vision_keys(**more) -> list:
    """Return the projector's metadata. `more`: keys to add or replace, without the prefix `clip.vision.`."""
    keys = {
        "image_size": (UINT32, SIDE),
        "patch_size": (UINT32, 5),
        "embedding_length": (UINT32, 48),
        "feed_forward_length": (UINT32, 64),
        "block_count": (UINT32, 3),
        "projection_dim": (UINT32, 48),
        "attention.head_count": (UINT32, 2),
        "attention.layer_norm_epsilon": (FLOAT32, 1e-5),  # Written by the converter; the model uses 1e-6.
        "image_mean": (ARRAY, (FLOAT32, [0.5] * 3)),
        "image_std": (ARRAY, (FLOAT32, [0.5] * 3)),
        "projector.scale_factor": (UINT32, SCALE),
        "preproc_image_size": (UINT32, 4 * SIDE),
    } | more
    return clip_keys("idefics3", [("clip.use_gelu", BOOL, True)], **keys)


def write_files(folder, out, swaps: bool = False, **more):
    """Write both files, and return the text model's path. `more`: as in `vision_keys`."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    keys = {
        "attention.key_length": (UINT32, text["head_dim"]),
        "rope.freq_base": (FLOAT32, text["rope_theta"]),
    }
    metadata = decoder_keys(text, "llama", **keys)
    own, towers = tensors_of(folder, swaps)
    model = out / "model-F32.gguf"
    model.write_bytes(write(metadata + vocabulary_of(folder, "smollm"), own).data)
    (out / "mmproj-F32.gguf").write_bytes(write(vision_keys(**more), towers).data)
    return model


@pytest.mark.parametrize("swaps", [False, True])
def test_the_files_answer_like_the_folder(folder, expected, tmp_path, swaps):
    model = write_files(folder, tmp_path, swaps)
    found = answers(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        for got, wanted in zip(mine, theirs, strict=True):
            assert [value for _, value in got] == pytest.approx([value for _, value in wanted], abs=1e-5)
    note = "projector mmproj-F32.gguf with the video sampling of SmolVLM2's processor"
    assert model_note(model) == f"{note}, and norms with epsilon 1e-06 as in transformers"


def test_another_epsilon_is_the_model_s_own(folder, tmp_path):
    changed = {"attention.layer_norm_epsilon": (FLOAT32, 1e-4)}
    model = write_files(folder, tmp_path, **changed)
    assert plugin_for(model).read_config(model).vision.norm_eps == pytest.approx(1e-4)
    assert "epsilon" not in model_note(model)


def test_a_projector_of_another_model_is_left_beside_a_text_model(folder, expected, tmp_path):
    """A folder may hold several models, so a text model ignores a projector that does not fit."""
    model = write_files(folder, tmp_path, projection_dim=(UINT32, 64))
    assert plugin_for(model).read_config(model).vision is None
    assert "text only, because the projector beside the model does not fit (" in model_note(model)
    assert answers_text(model) == expected[0][0]
    with pytest.raises(ModelError, match="it projects to 64 values, but model-F32.gguf has embeddings of 48"):
        GGUFModel(pair(model, tmp_path / "mmproj-F32.gguf"))


def answers_text(model):
    with Engine(model, device="cpu", dtype="float32") as engine:
        (answer,) = engine.generate([CHATS[0]], max_tokens=6, temperature=0, ignore_eos=True)
        return answer.token_ids
