"""Reads hybrid models from GGUF files (architectures qwen35 and qwen35moe): config fields, tensor names and
tensor values.

The file's values differ from transformers' in five ways. Norms are stored with 1 added, except the delta
net's norm. `ssm_a` is -exp(A_log). The convolution's weight has two dimensions instead of three. The shared
expert's gate may have one dimension instead of two. The delta net's value heads are tiled: value head h uses
key head h % number of key heads. mmengine keeps this order (`tiled` in models/decoder/config.py), because
reordering the columns of `ssm_out` would split quantised blocks. The last layers in the file are the
multi-token-prediction heads, if the model has any.
"""

import re
from dataclasses import replace

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf.stored_lists import SECTIONS, layer_flags, rope_sections
from mmengine.checkpoint.gguf.tensors import GGUFEntry

INTERVAL, RECURRENT, NEXTN = "full_attention_interval", "attention.recurrent_layers", "nextn_predict_layers"
SHARED_SIZE = "expert_shared_feed_forward_length"
_DELTA = {  # Required key -> its field in config.json, and its maximum.
    "ssm.conv_kernel": ("linear_conv_kernel_dim", 16),
    "ssm.state_size": ("linear_key_head_dim", 1024),
    "ssm.group_count": ("linear_num_key_heads", 1024),
    "ssm.time_step_rank": ("linear_num_value_heads", 1024),
}
_VALUES = "ssm.inner_size"  # Total size of all value heads.
KEYS = (SECTIONS, INTERVAL, RECURRENT, NEXTN, _VALUES, *_DELTA)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def num_trunk_layers(fields: Fields) -> int:
    """Return the number of layers without the multi-token-prediction heads. Raises ModelError."""
    count, heads = fields.integer("block_count", 1, 1024), _num_heads(fields)
    if heads >= count:
        fields.fail(f"{fields.prefix}{NEXTN} is {heads}, but the file has {count} layers")
    return count - heads


def _num_heads(fields: Fields) -> int:
    """Return how many of the file's layers are multi-token-prediction heads."""
    return fields.integer(NEXTN, 0, 1024, 0)


def hybrid_config(fields: Fields) -> dict[str, object]:
    """Return the fields of config.json that hybrid models add or change.

    Raises ModelError for sizes that are missing or contradict each other.
    """
    num_layers = num_trunk_layers(fields)
    config: dict[str, object] = {name: fields.integer(key, 1, most) for key, (name, most) in _DELTA.items()}
    heads, values = config["linear_num_value_heads"], fields.integer(_VALUES, 1, 2**20)
    assert isinstance(heads, int)
    if values % heads:
        fields.fail(f"{fields.prefix}{_VALUES} is {values}, which {heads} value heads do not share evenly")
    config |= {"linear_value_head_dim": values // heads, "linear_value_heads_tiled": True}
    config["layer_types"] = _layer_types(fields, num_layers)
    config |= {"num_hidden_layers": num_layers, "mtp_num_hidden_layers": _num_heads(fields)}
    if SHARED_SIZE in fields.values:
        config["shared_expert_intermediate_size"] = fields.integer(SHARED_SIZE, 1, 2**20)
    return config


def hybrid_rope(fields: Fields, rope: dict[str, object], head_dim: int) -> dict[str, object]:
    """Return `rope` with partial_rotary_factor and the M-RoPE sections."""
    rotated = fields.integer("rope.dimension_count", 2, head_dim)
    return rope | {
        "partial_rotary_factor": rotated / head_dim,
        "mrope_section": rope_sections(fields),
        "mrope_interleaved": True,
    }


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    kinds = ("full_attention", "linear_attention")
    if RECURRENT not in fields.values:
        every = fields.integer(INTERVAL, 1, 1024, 4)
        return [kinds[(layer + 1) % every != 0] for layer in range(num_layers)]
    return [kinds[is_recurrent] for is_recurrent in layer_flags(fields, RECURRENT, num_layers)]


def hybrid_name(name: str, num_layers: int) -> str:
    """Return a tensor's name in transformers' files. Layers from `num_layers` on become `mtp.layers`."""
    if (found := _LAYER.match(name)) is None or (layer := int(found[1])) < num_layers:
        return name
    return f"mtp.layers.{layer - num_layers}.{name[found.end() :]}"


def hybrid_entry(entry: GGUFEntry) -> GGUFEntry:
    """Return the entry with the shape and the values that transformers' checkpoints have."""
    name, shape = entry.stored_name, entry.shape
    if name.endswith(".ssm_a"):
        return replace(entry, adjust="log of the negative")
    if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        return replace(entry, adjust="less one")
    if name.endswith(".ssm_conv1d.weight") and len(shape) == 2:
        return replace(entry, shape=(shape[0], 1, shape[1]))
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
        return replace(entry, shape=(1, shape[0]))
    return entry
