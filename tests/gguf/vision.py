"""Writes a Qwen3-VL folder as two GGUF files, a text model and a projector. Keys and tensor names are those
of llama.cpp's converter. The writers for other model families reuse these functions.
"""

import json

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from mmengine.checkpoint.gguf.container import open_container
from mmengine.checkpoint.gguf.tensors import tensor_entry
from tests.gguf.quantising import quantise
from tests.gguf.writing import ARRAY, BLOCKS, BOOL, FLOAT32, INT32, STRING, UINT32, Tensor, write

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
SIGLIP = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
SWAP = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def tensor_of(name: str, values: np.ndarray, kind: str) -> Tensor:
    """Return the tensor in type `kind`. A vector is stored in float32. A matrix whose rows are not whole
    blocks is stored in float16.
    """
    if values.ndim == 1:
        kind = "F32"
    elif values.shape[-1] % BLOCKS[kind][1]:
        kind = "F16"
    return Tensor(name, kind, values.shape, quantise(kind, values))


def decoder_keys(text: dict, architecture: str, **more) -> list:
    """Return the metadata for a text config. `more`: keys to add or replace, without the architecture's
    prefix.
    """
    keys = {
        "block_count": (UINT32, text["num_hidden_layers"]),
        "context_length": (UINT32, text["max_position_embeddings"]),
        "embedding_length": (UINT32, text["hidden_size"]),
        "feed_forward_length": (UINT32, text["intermediate_size"]),
        "attention.head_count": (UINT32, text["num_attention_heads"]),
        "attention.head_count_kv": (UINT32, text["num_key_value_heads"]),
        "attention.layer_norm_rms_epsilon": (FLOAT32, text["rms_norm_eps"]),
    } | more
    first = [("general.architecture", STRING, architecture)]
    return first + [(f"{architecture}.{name}", *value) for name, value in keys.items()]


def text_keys(config: dict, *, architecture: str = "qwen3vl", **more) -> list:
    """Return the metadata for the text model of a Qwen3-VL config. `more`: as in `decoder_keys`."""
    text, vision = config["text_config"], config["vision_config"]
    rope = text["rope_parameters"]
    keys = {
        "attention.key_length": (UINT32, text["head_dim"]),
        "attention.value_length": (UINT32, text["head_dim"]),
        "rope.freq_base": (FLOAT32, rope["rope_theta"]),
        "rope.dimension_sections": (ARRAY, (INT32, [*rope["mrope_section"], 0])),
        "n_deepstack_layers": (UINT32, len(vision["deepstack_visual_indexes"])),
    }
    return decoder_keys(text, architecture, **(keys | more))


def vocabulary_of(folder, pre: str = "qwen2") -> list:
    """Return the metadata for a folder's tokenizer, which must split texts like the pre-tokenizer `pre`."""
    data = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    size = config.get("text_config", config)["vocab_size"]
    marks = json.loads((folder / "tokenizer_config.json").read_text())
    tokens, types = [f"[PAD{place}]" for place in range(size)], [5] * size
    for token, place in data["model"]["vocab"].items():
        tokens[place], types[place] = token, 1
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    merges = [each if isinstance(each, str) else " ".join(each) for each in data["model"]["merges"]]
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text()
    else:
        template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    return [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, pre),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, types)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, merges)),
        ("tokenizer.ggml.eos_token_id", UINT32, tokens.index(marks["eos_token"])),
        ("tokenizer.ggml.padding_token_id", UINT32, tokens.index(marks["pad_token"])),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STRING, template),
    ]


def clip_keys(projector: str, first: list, **keys) -> list:
    """Return a projector's metadata. `first`: additional entries with whole keys. `keys`: entries without the
    prefix `clip.vision.`.
    """
    start = [
        ("general.architecture", STRING, "clip"),
        ("clip.has_vision_encoder", BOOL, True),
        ("clip.projector_type", STRING, projector),
    ]
    return start + first + [(f"clip.vision.{name}", *value) for name, value in keys.items()]


def vision_keys(config: dict, **more) -> list:
    """Return a projector's metadata. `more`: keys to add or replace, without the prefix `clip.vision.`."""
    vision = config["vision_config"]
    deep = vision["deepstack_visual_indexes"]
    keys = {
        "image_size": (UINT32, 768),
        "patch_size": (UINT32, vision["patch_size"]),
        "embedding_length": (UINT32, vision["hidden_size"]),
        "feed_forward_length": (UINT32, vision["intermediate_size"]),
        "block_count": (UINT32, vision["depth"]),
        "projection_dim": (UINT32, vision["out_hidden_size"]),
        "attention.head_count": (UINT32, vision["num_heads"]),
        "attention.layer_norm_epsilon": (FLOAT32, 1e-6),
        "image_mean": (ARRAY, (FLOAT32, [0.5] * 3)),
        "image_std": (ARRAY, (FLOAT32, [0.5] * 3)),
        "spatial_merge_size": (UINT32, vision["spatial_merge_size"]),
        "is_deepstack_layers": (ARRAY, (BOOL, [layer in deep for layer in range(vision["depth"])])),
    } | more
    first = [("general.type", STRING, "mmproj"), ("clip.use_gelu", BOOL, True)]
    return clip_keys("qwen3vl_merger", first, **keys)


def weights_of(folder) -> dict[str, np.ndarray]:
    """Return a folder's tensors in float32, by transformers' names."""
    return {
        name: each.to(torch.float32).numpy() for name, each in load_file(folder / "model.safetensors").items()
    }


def decoder_tensors(
    weights: dict[str, np.ndarray], kind: str, layer: dict[str, str] = LAYER, added: float = 0
) -> list[Tensor]:
    """Return a text model's tensors. `weights`: arrays by tensor name, without the prefix `model.`. `added`:
    a number to add to norm weights.
    """
    found = []
    for name, values in weights.items():
        stem, _, ending = name.rpartition(".")
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            place = f"blk.{number}.{layer[part]}"
        else:
            place = WHOLE[stem]
        values = values + np.float32(added) if place.endswith("norm") else values
        found.append(tensor_of(f"{place}.{ending}", values, kind))
    return found


def text_tensors(weights: dict[str, np.ndarray], kind: str) -> list[Tensor]:
    """Return the tensors of a Qwen3-VL folder's text model."""
    own = {name.removeprefix("model.language_model."): values for name, values in weights.items()}
    return decoder_tensors({name: values for name, values in own.items() if "visual." not in name}, kind)


def patch_tensors(values: np.ndarray, kind: str) -> list[Tensor]:
    """Return the tensors of a patch embedding, one for each of its two frames."""
    places = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    return [
        tensor_of(place, np.ascontiguousarray(values[:, :, frame]), kind)
        for frame, place in enumerate(places)
    ]


def tower_name(layer: str, part: str, swaps: bool) -> str:
    """Return the name of a vision tower's tensor. `swaps`: exchange the names of an MLP's two matrices, as in
    old files.
    """
    return f"v.blk.{layer}.{SWAP.get(part, part) if swaps else part}"


def vision_tensors(
    weights: dict[str, np.ndarray], config: dict, kind: str, *, swaps: bool = False
) -> list[Tensor]:
    """Return a projector's tensors. `swaps`: as in `tower_name`."""
    deep = config["vision_config"]["deepstack_visual_indexes"]
    found = []
    for name, values in weights.items():
        if "visual." not in name:
            continue
        stem, _, ending = name.partition("visual.")[2].rpartition(".")
        if stem == "patch_embed.proj" and ending == "weight":
            found += patch_tensors(values, "F16" if kind == "F16" else "F32")
            continue
        if stem.startswith("blocks."):
            _, layer, part = stem.split(".", 2)
            stem = tower_name(layer, BLOCK[part], swaps)
        elif stem.startswith("deepstack_merger_list."):
            _, place, part = stem.split(".")
            step = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part]
            stem = f"v.deepstack.{deep[int(place)]}.{step}"
        else:
            stem = {
                "patch_embed.proj": "v.patch_embd",
                "pos_embed": "v.position_embd",
                "merger.norm": "v.post_ln",
                "merger.linear_fc1": "mm.0",
                "merger.linear_fc2": "mm.2",
            }[stem]
        found.append(tensor_of(f"{stem}.{ending}", values, "F32" if "position" in stem else kind))
    return found


def write_pair(folder, out, kind: str = "F32", projector: str = "F32", **more) -> tuple:
    """Write `model-KIND.gguf` and `mmproj-model-PROJECTOR.gguf` for a Qwen3-VL folder. Returns their paths.

    `more`: options of `vision_tensors`.
    """
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    model, towers = out / f"model-{kind}.gguf", out / f"mmproj-model-{projector}.gguf"
    model.write_bytes(write(text_keys(config) + vocabulary_of(folder), text_tensors(weights, kind)).data)
    towers.write_bytes(write(vision_keys(config), vision_tensors(weights, config, projector, **more)).data)
    return model, towers


def package_reader(path) -> gguf.GGUFReader:
    """Return the reader from the package `gguf`, after a check that our reader finds the same values."""
    theirs, mine = gguf.GGUFReader(path), open_container(path)
    assert {each.name for each in theirs.tensors} == mine.tensors.keys()
    for each in theirs.tensors:
        entry = tensor_entry(mine.tensors[each.name])
        values = np.concatenate([rows for _, rows in entry.pieces(0, entry.shape[0])])
        assert np.array_equal(gguf.dequantize(each.data, each.tensor_type).reshape(entry.shape), values)
    return theirs
