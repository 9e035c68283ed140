"""Tests that the whole model gives the same logits as transformers for any batches and chunks, with the CPU
kernels and with torch.
"""

import numpy as np
import pytest
import torch
from qwen3_vl_reference import (
    make_prompt,
    make_reference,
    ragged_steps,
    reference_inputs,
    reference_logits,
    run_rows,
    whole_steps,
)

from mmengine.models.decoder.native_text import NativeTextDecoder
from mmengine.models.decoder.tensors import HEAD
from mmengine.models.decoder.text import TextDecoder
from mmengine.native import library
from mmengine_qwen3_vl import plugin
from mmengine_qwen3_vl.config import read_config

TOLERANCE = 1e-4
PARTS = {
    "text": [17],
    "one image": [3, ("image", (4, 6)), 5],
    "two images": [2, ("image", (2, 8)), 1, ("image", (6, 4)), 4],
    "video": [3, ("video", (3, 4, 4)), 6],
    "mixed": [2, ("video", (2, 2, 6)), 3, ("image", (8, 2)), ("image", (4, 4)), 2, ("video", (1, 6, 6)), 4],
}
CONFIGS = {
    "untied": {"tied": False},
    "every head its own key": {"text": {"num_key_value_heads": 4}},
    "one key-value head": {"text": {"num_attention_heads": 6, "num_key_value_heads": 1}},
    "wide heads": {
        "text": {
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]},
        }
    },
    "biases": {"text": {"attention_bias": True}},
    "no deepstack": {"vision": {"deepstack_visual_indexes": []}},
    "deepstack out of order": {"vision": {"depth": 4, "deepstack_visual_indexes": [3, 0, 1]}},
    "exact gelu, odd sizes": {
        "text": {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "rms_norm_eps": 1e-5},
        "vision": {
            "hidden_act": "gelu",
            "out_hidden_size": 40,
            "hidden_size": 24,
            "num_heads": 2,
            "patch_size": 8,
        },
    },
    "video patches of one frame": {"vision": {"temporal_patch_size": 1, "num_position_embeddings": 49}},
}


@pytest.fixture(scope="module", autouse=True, params=["compiled", "torch"])
def decoder(request):
    """Make all models use the decoder class that this fixture yields."""
    if request.param == "torch":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mmengine.models.network.native.load", lambda: None)
            yield TextDecoder
        return
    if library.load() is None:
        pytest.skip(library.describe())
    yield NativeTextDecoder


def test_the_requested_decoder_is_used(tiny, decoder):
    assert type(tiny[1]._text) is decoder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, decoder):
    folder = tmp_path_factory.mktemp("tiny")
    reference = make_reference(folder)
    return reference, plugin.load_model(folder, device="cpu", dtype="float32")


def largest_difference(model, reference, prompts, steps):
    with torch.inference_mode():
        ours = run_rows(model, prompts, steps)
    assert min(logits.std() for logits in ours) > 1000 * TOLERANCE, "the logits vary too little to tell"
    return max(
        (mine - reference_logits(reference, prompt)).abs().max().item()
        for mine, prompt in zip(ours, prompts, strict=True)
    )


@pytest.mark.parametrize("kind", PARTS)
def test_prefill_alone(tiny, kind):
    reference, model = tiny
    prompt = make_prompt(PARTS[kind], np.random.default_rng(1))
    assert largest_difference(model, reference, [prompt], whole_steps([prompt])) < TOLERANCE


@pytest.mark.parametrize("largest", [1, 3, 9])
def test_ragged_chunks_of_mixed_rows(tiny, largest):
    reference, model = tiny
    rng = np.random.default_rng(largest)
    prompts = [make_prompt(parts, rng) for parts in PARTS.values()]
    steps = ragged_steps(prompts, rng, largest)
    assert any(len(step) > 2 for step in steps)
    assert largest_difference(model, reference, prompts, steps) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path, name):
    reference = make_reference(tmp_path, seed=3, **CONFIGS[name])
    model = plugin.load_model(tmp_path, device="cpu", dtype="float32")
    rng = np.random.default_rng(4)
    prompts = [make_prompt(parts, rng, patch_width=model.spec.patch_width) for parts in PARTS.values()]
    assert largest_difference(model, reference, prompts, whole_steps(prompts)) < TOLERANCE
    assert largest_difference(model, reference, prompts, ragged_steps(prompts, rng, 12)) < TOLERANCE


@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_greedy_tokens_equal_generate(tiny, kind):
    reference, model = tiny
    prompt = make_prompt(PARTS[kind], np.random.default_rng(5))
    with torch.inference_mode():
        inputs = reference_inputs(prompt)
        expected = reference.generate(
            **inputs, do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0
        )[0, len(prompt.ids) :]
    assert len(set(expected.tolist())) > 5, "too few distinct tokens: the comparison proves nothing"
    # Append the generated tokens as text. Their positions include the prompt's M-RoPE delta.
    _, delta = plugin.positions(prompt.ids, prompt.media)
    prompt.ids = np.concatenate((prompt.ids, expected.numpy().astype(np.int32)))
    prompt.types = np.concatenate((prompt.types, np.zeros(20, prompt.types.dtype)))
    positions, _ = plugin.positions(prompt.ids, prompt.media)
    start = len(prompt.ids) - 20
    assert (positions[:, start:] == np.arange(start, start + 20) + delta).all()
    with torch.inference_mode():
        logits = run_rows(model, [prompt], [[(0, start)], *[[(0, 1)]] * 20])[0]
    assert logits[start - 1 : -1].argmax(-1).tolist() == expected.tolist()


def test_hub_style_config_gives_the_same_model(tmp_path):
    import json

    reference = make_reference(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = rope
    del config["vision_config"]["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = plugin.load_model(tmp_path, device="cpu", dtype="float32")
    prompt = make_prompt(PARTS["mixed"], np.random.default_rng(6))
    assert largest_difference(model, reference, [prompt], whole_steps([prompt])) < TOLERANCE


def test_bfloat16_is_as_near_as_its_rounding_allows(tmp_path):
    """In bfloat16, logits differ from transformers' by less than transformers' own rounding error."""
    from transformers import Qwen3VLForConditionalGeneration

    exact = make_reference(tmp_path)
    model = plugin.load_model(tmp_path, device="cpu", dtype="bfloat16")
    rounded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    prompt = make_prompt(PARTS["mixed"], np.random.default_rng(7))
    with torch.inference_mode():
        mine = run_rows(model, [prompt], whole_steps([prompt]))[0]
    theirs, truth = reference_logits(rounded, prompt), reference_logits(exact, prompt)
    ours_to_theirs = (mine - theirs).square().mean().sqrt()
    theirs_to_truth = (theirs - truth).square().mean().sqrt()
    print(f"bf16: ours to theirs {ours_to_theirs:.4f}, theirs to float32 {theirs_to_truth:.4f}")
    assert ours_to_theirs < theirs_to_truth


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_stored_beside_a_tied_config(tmp_path, equal):
    """If the config ties the embeddings, a stored head is used only if it differs from the embedding,
    as in transformers.
    """
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3VLForConditionalGeneration

    make_reference(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.language_model.embed_tokens.weight"]
    tensors[HEAD] = embedding.clone() if equal else embedding.flip(0)
    save_file(tensors, path, metadata={"format": "pt"})
    reference = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = plugin.load_model(tmp_path, device="cpu", dtype="float32")
    prompt = make_prompt(PARTS["one image"], np.random.default_rng(8))
    assert largest_difference(model, reference, [prompt], whole_steps([prompt])) < TOLERANCE


def test_the_embedded_checkpoint():
    from transformers import Qwen3VLForConditionalGeneration

    from mmengine_shapes import checkpoint_path

    folder = checkpoint_path()
    reference = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model = plugin.load_model(folder, device="cpu", dtype="float32")
    rng = np.random.default_rng(9)
    prompts = [make_prompt(parts, rng, patch_width=model.spec.patch_width) for parts in PARTS.values()]
    config = read_config(folder)
    for prompt in prompts:
        prompt.ids[prompt.types == 1] = config.image_token_id
        prompt.ids[prompt.types == 2] = config.video_token_id
    assert largest_difference(model, reference, prompts, ragged_steps(prompts, rng, 12)) < TOLERANCE
