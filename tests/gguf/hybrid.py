"""Writes a Qwen3.5 folder as GGUF files with the keys, names and values of llama.cpp's converter."""

import json
import re

import numpy as np

from tests.gguf.vision import (
    LAYER,
    WHOLE,
    tensor_of,
    text_keys,
    vision_keys,
    vision_tensors,
    vocabulary_of,
    weights_of,
)
from tests.gguf.writing import ARRAY, INT32, UINT32, Tensor, write

PARTS = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
HEAD = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


def keys(config: dict, *, has_head: bool) -> list:
    """Return the metadata for the text model of a Qwen3.5 config. `has_head`: whether the folder has a
    multi-token-prediction head.
    """
    text = config.get("text_config", config)
    moe = "num_experts" in text
    name = "qwen35moe" if moe else "qwen35"
    sized = {"intermediate_size": 0} | text
    whole = {"vision_config": {"deepstack_visual_indexes": []}, "text_config": sized}
    left_out = {"n_deepstack_layers", "block_count", *(["feed_forward_length"] if moe else [])}
    found = text_keys(whole, architecture=name)
    found = [each for each in found if each[0].removeprefix(f"{name}.") not in left_out]
    more = {
        "block_count": text["num_hidden_layers"] + has_head,
        "rope.dimension_count": int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]),
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_num_value_heads"] * text["linear_value_head_dim"],
        "full_attention_interval": 4,
    }
    if has_head:
        more["nextn_predict_layers"] = 1
    if moe:
        more |= {
            "expert_count": text["num_experts"],
            "expert_used_count": text["num_experts_per_tok"],
            "expert_feed_forward_length": text["moe_intermediate_size"],
            "expert_shared_feed_forward_length": text["shared_expert_intermediate_size"],
        }
    recurrent = [int(kind == "linear_attention") for kind in text["layer_types"]]
    found.append((f"{name}.attention.recurrent_layers", ARRAY, (INT32, recurrent + [0] * has_head)))
    return found + [(f"{name}.{key}", UINT32, value) for key, value in more.items()]


def tiled(values: np.ndarray, axis: int, config: dict, size: int) -> np.ndarray:
    """Reorder the value heads along `axis`, so that value head h uses key head h % number of key heads. In
    `values`, the value heads of a key head are adjacent. A head has `size` values.
    """
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    values = np.moveaxis(values, axis, 0)
    heads_of = values.reshape(keys, heads // keys, size, *values.shape[1:])
    moved = heads_of.swapaxes(0, 1).reshape(values.shape)
    return np.ascontiguousarray(np.moveaxis(moved, 0, axis))


def changed(part: str, values: np.ndarray, config: dict) -> np.ndarray:
    """Return a layer's tensor as the converter writes it. `part`: the tensor's name in transformers, without
    the layer's prefix.
    """
    size = config["linear_value_head_dim"]
    start = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if part == "linear_attn.A_log":
        return tiled(-np.exp(values), 0, config, 1)
    if part in ("linear_attn.dt_bias", "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"):
        return tiled(values, 0, config, 1)
    if part == "linear_attn.in_proj_z.weight":
        return tiled(values, 0, config, size)
    if part == "linear_attn.out_proj.weight":
        return tiled(values, 1, config, size)
    if part in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        values = values.reshape(len(values), -1)
        return np.concatenate((values[:start], tiled(values[start:], 0, config, size)))
    if part.endswith("norm.weight") and part != "linear_attn.norm.weight":
        return values + np.float32(1)
    return values.reshape(-1) if part == "mlp.shared_expert_gate.weight" else values


def _by_number(item: tuple[str, np.ndarray]) -> list[str | int]:
    return [int(each) if each.isdecimal() else each for each in re.split(r"(\d+)", item[0])]


def tensors(weights: dict[str, np.ndarray], config: dict, kind: str) -> list[Tensor]:
    text = config.get("text_config", config)
    found, last = [], text["num_hidden_layers"]
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in sorted(weights.items(), key=_by_number):
        if "visual." in name:
            continue
        stem = name.replace("model.language_model.", "").removeprefix("model.")
        if stem.startswith("mtp.") and not stem.startswith("mtp.layers."):
            head = stem.split(".")[1]
            values = values if head == "fc" else values + np.float32(1)
            found.append(tensor_of(f"blk.{last}.nextn.{HEAD[head]}.weight", values, kind))
            continue
        if "layers." not in stem:
            whole = stem.removesuffix(".weight")
            values = values + np.float32(1) if whole == "norm" else values
            found.append(tensor_of(f"{WHOLE[whole]}.weight", values, kind))
            continue
        layer, part = stem.removeprefix("mtp.").removeprefix("layers.").split(".", 1)
        block = f"blk.{last + int(layer) if stem.startswith('mtp.') else layer}"
        values = changed(part, values, text)
        if alone := re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj\.weight", part):
            experts.setdefault(f"{block}.ffn_{alone[1]}_exps.weight", []).append(values)
        elif part == "mlp.experts.gate_up_proj":
            for half, place in zip(np.split(values, 2, 1), ("gate", "up"), strict=True):
                found.append(tensor_of(f"{block}.ffn_{place}_exps.weight", np.ascontiguousarray(half), kind))
        elif part == "mlp.experts.down_proj":
            found.append(tensor_of(f"{block}.ffn_down_exps.weight", values, kind))
        elif part in ("linear_attn.A_log", "linear_attn.dt_bias"):
            named = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}[part]
            found.append(tensor_of(f"{block}.{named}", values, "F32"))
        else:
            exact = "F32" if "conv1d" in part or part == "mlp.gate.weight" else kind
            found.append(tensor_of(f"{block}.{PARTS[part.removesuffix('.weight')]}.weight", values, exact))
    return found + [tensor_of(name, np.stack(each), kind) for name, each in experts.items()]


def write_hybrid(folder, out, kind: str = "F32", projector: str = "F32", edit_keys=list, edit_tensors=list):
    """Write `model-KIND.gguf`, and `mmproj-model-PROJECTOR.gguf` if the folder has a vision tower. Returns
    the model's path. `edit_keys`, `edit_tensors`: functions that change the text model's lists of metadata
    and tensors.
    """
    config, weights = json.loads((folder / "config.json").read_text()), weights_of(folder)
    has_head = any(name.startswith("mtp.") for name in weights)
    path = out / f"model-{kind}.gguf"
    metadata = edit_keys(keys(config, has_head=has_head)) + vocabulary_of(folder, "qwen35")
    path.write_bytes(write(metadata, edit_tensors(tensors(weights, config, kind))).data)
    if "vision_config" in config:
        vision = config | {"vision_config": config["vision_config"] | {"deepstack_visual_indexes": []}}
        towers = write(vision_keys(vision), vision_tensors(weights, vision, projector)).data
        (out / f"mmproj-model-{projector}.gguf").write_bytes(towers)
    return path
