"""Converts checkpoint folders of Gemma 3, Qwen2-VL and Qwen2.5-VL to GGUF files, with the keys and tensor
names of llama.cpp's converter.
"""

import json

import numpy as np

from tests.gguf.vision import (
    LAYER,
    SIGLIP,
    clip_keys,
    decoder_keys,
    decoder_tensors,
    patch_tensors,
    tensor_of,
    tower_name,
    vocabulary_of,
    weights_of,
)
from tests.gguf.writing import ARRAY, BOOL, FLOAT32, INT32, UINT32, Tensor, write

GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA_PLACES = {
    "vision_tower.embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "vision_tower.embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "vision_tower.embeddings.position_embedding.weight": "v.position_embd.weight",
    "vision_tower.post_layernorm.weight": "v.post_ln.weight",
    "vision_tower.post_layernorm.bias": "v.post_ln.bias",
    "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
    "multi_modal_projector.mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
}
QWEN = {
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QWEN_PLACES = {"patch_embed.proj": "v.patch_embd", "merger.ln_q": "v.post_ln"}
QWEN_PLACES |= {"merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"}


def gemma_keys(text: dict, **more) -> list:
    rope = text["rope_parameters"]
    keys = {
        "attention.key_length": (UINT32, text["head_dim"]),
        "attention.value_length": (UINT32, text["head_dim"]),
        "attention.sliding_window": (UINT32, text["sliding_window"]),
        "rope.freq_base": (FLOAT32, rope["full_attention"]["rope_theta"]),
    }
    return decoder_keys(text, "gemma3", **(keys | more))


def write_files(
    folder, out, text: list, own: list[Tensor], clip: list, towers: list[Tensor], pre: str = "gpt-2"
):
    """Write the text model, and the projector if `clip` is not empty. Returns the text model's path.

    `text`, `own`: the text model's metadata and tensors. `clip`, `towers`: the same for the projector.
    """
    marks = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    bos = next(each["id"] for each in tokens if each["content"] == marks["bos_token"])
    words = [*vocabulary_of(folder, pre), ("tokenizer.ggml.bos_token_id", UINT32, bos)]
    path = out / "model-F32.gguf"
    path.write_bytes(write(text + words, own).data)
    if clip:
        (out / "mmproj-F32.gguf").write_bytes(write(clip, towers).data)
    return path


def write_gemma(folder, out, kind: str = "F32", *, swaps: bool = False, keys=None, vision=None):
    """Write a Gemma 3 folder as GGUF files. `swaps`: exchange the names of the projector's MLP matrices, as
    in old files. `keys`, `vision`: metadata to add or replace in the text model and in the projector.
    """
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    text = config.get("text_config", config)
    prefixes = ("language_model.model.", "language_model.", "model.")
    own, towers = {}, []
    for name, values in weights.items():
        if name.startswith(("vision_tower.", "multi_modal_projector.")):
            towers += gemma_tower(name, values, swaps)
        else:
            prefix = next((each for each in prefixes if name.startswith(each)), "")
            own[name.removeprefix(prefix)] = values
    clip = gemma_clip(config, **(vision or {})) if towers else []
    tensors = decoder_tensors(own, kind, GEMMA_LAYER, 1)
    return write_files(folder, out, gemma_keys(text, **(keys or {})), tensors, clip, towers)


def gemma_tower(name: str, values: np.ndarray, swaps: bool) -> list[Tensor]:
    if ".head." in name:
        return []  # The converter drops SigLIP's head, because Gemma 3 does not use it.
    if name in GEMMA_PLACES:
        place = GEMMA_PLACES[name]
        values = values + np.float32(1) if "norm" in place else values
        return [tensor_of(place, values, "F32")]
    stem, _, ending = name.removeprefix("vision_tower.encoder.layers.").rpartition(".")
    layer, _, part = stem.partition(".")
    return [tensor_of(f"{tower_name(layer, SIGLIP[part], swaps)}.{ending}", values, "F32")]


def gemma_clip(config: dict, **more) -> list:
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"]
    keys = {
        "image_size": (UINT32, vision["image_size"]),
        "patch_size": (UINT32, vision["patch_size"]),
        "embedding_length": (UINT32, vision["hidden_size"]),
        "feed_forward_length": (UINT32, vision["intermediate_size"]),
        "block_count": (UINT32, vision["num_hidden_layers"]),
        "projection_dim": (UINT32, config["text_config"]["hidden_size"]),
        "attention.head_count": (UINT32, vision["num_attention_heads"]),
        "attention.layer_norm_epsilon": (FLOAT32, vision["layer_norm_eps"]),
        "projector.scale_factor": (UINT32, round(side / config["mm_tokens_per_image"] ** 0.5)),
        "image_mean": (ARRAY, (FLOAT32, [0.5] * 3)),
        "image_std": (ARRAY, (FLOAT32, [0.5] * 3)),
    } | more
    return clip_keys("gemma3", [("clip.use_gelu", BOOL, True)], **keys)


def write_qwen2_vl(folder, out, kind: str = "F32", *, swaps: bool = False, fused: bool = False, vision=None):
    """Write a Qwen2-VL or Qwen2.5-VL folder as GGUF files. `swaps`, `vision`: as in `write_gemma`. `fused`:
    store the query, key and value weights as one tensor.
    """
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    text, towers, own = config["text_config"], [], {}
    for name, values in weights.items():
        if name.startswith("visual."):
            towers += qwen_tower(name.removeprefix("visual."), values, swaps, fused)
        else:
            own[name.removeprefix("model.")] = values
    rope = text["rope_parameters"]
    keys = {
        "rope.freq_base": (FLOAT32, rope["rope_theta"]),
        "rope.dimension_sections": (ARRAY, (INT32, [*rope["mrope_section"], 0])),
    }
    tensors = decoder_tensors(own, kind, LAYER, 0)
    clip = qwen_clip(config, **(vision or {}))
    return write_files(folder, out, decoder_keys(text, "qwen2vl", **keys), tensors, clip, towers)


def qwen_tower(name: str, values: np.ndarray, swaps: bool, fused: bool) -> list[Tensor]:
    stem, _, ending = name.rpartition(".")
    if name == "patch_embed.proj.weight":
        return patch_tensors(values, "F32")
    if stem in QWEN_PLACES:
        return [tensor_of(f"{QWEN_PLACES[stem]}.{ending}", values, "F32")]
    _, layer, part = stem.split(".", 2)
    if part == "attn.qkv":
        names = ["attn_qkv"] if fused else ["attn_q", "attn_k", "attn_v"]
        cut = np.split(values, len(names))
        return [
            tensor_of(f"v.blk.{layer}.{each}.{ending}", rows, "F32")
            for each, rows in zip(names, cut, strict=True)
        ]
    return [tensor_of(f"{tower_name(layer, QWEN[part], swaps)}.{ending}", values, "F32")]


def qwen_clip(config: dict, **more) -> list:
    vision, is_gated = config["vision_config"], config["model_type"] == "qwen2_5_vl"
    hidden = vision["hidden_size"] if is_gated else vision["embed_dim"]
    # For Qwen2-VL, llama.cpp's converter writes hidden_size, which is wrong.
    size = vision["intermediate_size"] if is_gated else vision["hidden_size"]
    keys = {
        "image_size": (UINT32, 560),
        "patch_size": (UINT32, vision["patch_size"]),
        "embedding_length": (UINT32, hidden),
        "feed_forward_length": (UINT32, size),
        "block_count": (UINT32, vision["depth"]),
        "projection_dim": (UINT32, config["text_config"]["hidden_size"]),
        "attention.head_count": (UINT32, vision["num_heads"]),
        "attention.layer_norm_epsilon": (FLOAT32, 1e-6),
        "image_mean": (ARRAY, (FLOAT32, [0.48145466, 0.4578275, 0.40821073])),
        "image_std": (ARRAY, (FLOAT32, [0.26862954, 0.26130258, 0.27577711])),
    }
    if is_gated:
        keys["n_wa_pattern"] = (UINT32, vision["fullatt_block_indexes"][0] + 1)
    own = [("clip.use_silu", BOOL, True)] if is_gated else []
    return clip_keys("qwen2.5vl_merger" if is_gated else "qwen2vl_merger", own, **(keys | more))
