"""Tests that GGUF models with a projector give the same answers about images as safetensors folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmengine import Engine
from mmengine.checkpoint.gguf.container import open_container
from mmengine.checkpoint.gguf.model import GGUFModel
from mmengine.checkpoint.gguf.pair import pair
from mmengine.checkpoint.model_files import model_note
from mmengine.errors import InvalidRequest, ModelError
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.processing.media.grids import ImageSettings
from tests.gguf.vision import (
    package_reader,
    text_keys,
    vision_keys,
    vision_tensors,
    vocabulary_of,
    weights_of,
    write_pair,
)
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, STRING, UINT32, tensor, write
from tests.models.test_contract_qwen3_vl import TestQwen3VL as Random
from tests.pictures import asked, noise

LIMITS = {"shortest_edge": 65536, "longest_edge": 16777216}
PICTURE = noise(1, (300, 260))
CHATS = (
    asked("What is it?"),
    asked(PICTURE, "What is in it?"),
    asked(PICTURE, noise(2, (256, 300)), "Which one?"),
)


class Sizes(Random):
    sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a random checkpoint with weights that are exact in float16 and bfloat16."""
    folder = tmp_path_factory.mktemp("random")
    Sizes().make_checkpoint(folder)
    path = folder / "model.safetensors"
    rounded = {name: each.to(torch.bfloat16).to(torch.float16) for name, each in load_file(path).items()}
    exact = {name: torch.where(each.abs() < 1e-4, 0, each).float() for name, each in rounded.items()}
    save_file(exact, path, metadata={"format": "pt"})
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": LIMITS}))
    return folder


def answers(model):
    """Return the tokens and log-probabilities of greedy answers to CHATS."""
    with Engine(model, device="cpu", dtype="float32") as engine:
        outputs = engine.generate(list(CHATS), max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
        return [(each.token_ids, each.choices[0].logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(folder):
    return answers(folder)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_pair_answers_like_its_folder(folder, expected, tmp_path, kind):
    model, _ = write_pair(folder, tmp_path, kind, kind)
    assert answers(model) == expected


def decoded_folder(folder, model, out):
    """Copy the folder, and replace its weights by decoded weights from both GGUF files."""
    shutil.copytree(folder, out)
    names = plugin_for(folder).names
    entries = GGUFModel(model).tensors(names.canonical)
    found = {}
    for name in load_file(folder / "model.safetensors"):
        entry = entries[names.canonical(name)]
        pieces = [torch.from_numpy(rows) for _, rows in entry.pieces(0, entry.shape[0])]
        found[name] = torch.cat(pieces).reshape(entry.shape).contiguous()
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_a_quantised_pair_answers_like_its_decoded_values(folder, expected, tmp_path):
    model, projector = write_pair(folder, tmp_path, "Q8_0", "Q8_0")
    plain = answers(decoded_folder(folder, model, tmp_path / "plain"))
    for (tokens, pairs), (decoded, theirs) in zip(answers(model), plain, strict=True):
        assert tokens == decoded
        for mine, exact in zip(pairs, theirs, strict=True):
            assert [value for _, value in mine] == pytest.approx([value for _, value in exact], abs=2e-3)
    assert plain != expected  # The quantisation changes the logprobs.


def test_a_projector_with_swapped_names_is_read_as_it_is_meant(folder, expected, tmp_path):
    model, projector = write_pair(folder, tmp_path, swaps=True)
    assert "v.blk.0.ffn_down.weight" in GGUFModel(model).projector.container.tensors
    assert answers(model) == expected


def test_a_named_projector_is_preferred_to_the_one_beside_the_model(folder, expected, tmp_path):
    (tmp_path / "other").mkdir()
    model, projector = write_pair(folder, tmp_path)
    named = projector.rename(tmp_path / "other" / "towers.gguf")
    assert GGUFModel(model).projector is None
    assert answers(pair(model, named)) == expected


def test_without_a_projector_the_model_reads_text_and_says_how_it_would_see(folder, expected, tmp_path):
    model, projector = write_pair(folder, tmp_path)
    for name in (pair(model, "none"), model):
        with Engine(name, device="cpu", dtype="float32") as engine:
            (answer,) = engine.generate([CHATS[0]], max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
            assert answer.token_ids == expected[0][0]
            with pytest.raises(
                InvalidRequest, match=r"no images; leave it out, or serve .* projector \(--mmproj\)"
            ):
                engine.generate([CHATS[1]])
        projector.unlink(missing_ok=True)


def test_the_pixel_limits_are_those_of_the_family(folder, tmp_path):
    model, projector = write_pair(folder, tmp_path)
    said = model_note(model)
    assert said == (
        "projector mmproj-model-F32.gguf with the pixel limits of Qwen3-VL's processor (65,536 to 16,777,216)"
    )
    processor = plugin_for(model).load_processor(model)
    assert processor.media.settings.image == ImageSettings(65536, 16777216)
    assert processor.media.settings.video.max_pixels == 25165824
    projector.unlink()
    assert model_note(model) == "text only, because no projector is beside the model (--mmproj)"


@pytest.fixture(scope="module")
def parts(folder):
    """Return the folder's config and weights."""
    return json.loads((folder / "config.json").read_text()), weights_of(folder)


# Case -> (changed keys of the projector, without `clip.vision.`, and the error's text).
REFUSED = {
    "another model": (
        {"projection_dim": (UINT32, 80)},
        "projects to 80 values, but model-F32.gguf .* of 64: it",
    ),
    "another depth": ({"is_deepstack_layers": (UINT32, 3)}, "is_deepstack_layers is 3; 3 truth values are"),
    "another epsilon": ({"attention.layer_norm_epsilon": (FLOAT32, 1e-5)}, "epsilon is 1e-05; Qwen3-VL has"),
    "a wild size": ({"embedding_length": (UINT32, 2**31)}, "embedding_length is 2147483648; it must be"),
    "wild patches": ({"patch_size": (UINT32, 0)}, "patch_size is 0; it must be an integer from 1 to 256"),
    "other means": ({"image_mean": (ARRAY, (FLOAT32, [0.25] * 3))}, "image_mean is .* only .* is supported"),
    "no means": ({"image_mean": (FLOAT32, 0.5)}, "image_mean is 0.5; it must be three numbers"),
    "fewer deepstack layers": (
        {"is_deepstack_layers": (ARRAY, (BOOL, [True, False, False]))},
        "n_deepstack_layers is 2, but .* has 1 deepstack layers: it is the projector of another model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_projector_that_does_not_fit_is_refused(folder, parts, tmp_path, name):
    model, projector = write_pair(folder, tmp_path)
    changed, said = REFUSED[name]
    projector.write_bytes(
        write(vision_keys(parts[0], **changed), vision_tensors(parts[1], parts[0], "F32")).data
    )
    refused(model, said)


def refused(model, said):
    with pytest.raises(ModelError, match=said) as error:
        plugin_for(resolve_folder(model)).load_processor(resolve_folder(model))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_files_that_are_no_projector_are_refused(folder, parts, tmp_path):
    model, projector = write_pair(folder, tmp_path)
    text = tmp_path / "text.gguf"
    text.write_bytes(write(text_keys(parts[0], architecture="qwen3") + vocabulary_of(folder), []).data)
    refused(
        pair(model, text), "text.gguf: general.architecture is 'qwen3'; a projector's is clip: give another"
    )
    refused(pair(text, projector), "text.gguf: 'qwen3' is a text model; it takes no projector")
    refused(pair(model, tmp_path / "none.gguf"), "there is no projector .*none.gguf")
    refused(projector, "it is a projector, not a model; give the model's file, and this one with --mmproj")
    refused(pair(folder, projector), "is no GGUF file, so it has no projector; leave --mmproj out")
    keys = [key for key in vision_keys(parts[0]) if key[0] != "clip.projector_type"]
    for kind in ("gemma3", "qwen2.5vl_merger"):
        found = [*keys, ("clip.projector_type", STRING, kind)]
        projector.write_bytes(write(found, vision_tensors(parts[1], parts[0], "F32")).data)
        refused(
            model, f"its projector type is '{kind}', but model-F32.gguf is qwen3vl and needs qwen3vl_merger"
        )


def test_the_frames_of_the_patch_embedding_have_one_shape(folder, parts, tmp_path):
    model, projector = write_pair(folder, tmp_path)
    tensors = vision_tensors(parts[1], parts[0], "F32")
    second = next(place for place, each in enumerate(tensors) if each.name == "v.patch_embd.weight.1")
    small = tensors[second].shape[:1] + (3, 8, 16)
    tensors[second] = tensor("v.patch_embd.weight.1", "F32", small)
    projector.write_bytes(write(vision_keys(parts[0]), tensors).data)
    refused(model, r"v.patch_embd.weight.1 have shapes .* equal shapes with four dimensions are required")


def test_tensors_that_are_missing_or_unknown_are_named(folder, parts, tmp_path):
    model, projector = write_pair(folder, tmp_path)
    tensors = vision_tensors(parts[1], parts[0], "F32")
    for changed, said in (
        (
            [each for each in tensors if each.name != "v.blk.1.ln2.bias"],
            "no tensor visual.blocks.1.norm2.bias",
        ),
        ([*tensors, tensor("v.deepstack.1.fc1.bias", "F32", (4,))], "v.deepstack.1.fc1.bias does not belong"),
    ):
        projector.write_bytes(write(vision_keys(parts[0]), changed).data)
        with pytest.raises(ModelError, match=said):
            plugin_for(model).load_model(model, device="cpu", dtype="float32")


def test_the_written_files_are_those_of_the_gguf_package(folder, tmp_path):
    """The package `gguf` reads the same keys and values as our reader."""
    for path in write_pair(folder, tmp_path, "Q8_0", "F16"):
        theirs, mine = package_reader(path), open_container(path)
        for key in ("general.architecture", "qwen3vl.embedding_length", "clip.vision.projection_dim"):
            field = theirs.fields.get(key)
            assert (field and field.contents()) == mine.metadata.get(key)
