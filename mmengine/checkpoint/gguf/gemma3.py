"""Reads Gemma 3's text models in GGUF files (architecture gemma3): config fields, names and values.

A GGUF file differs from a transformers folder in two ways. Norm weights are stored with 1 added.
`layer_types` is missing: if the file has a sliding window, five of six layers use the window by default. In
both formats, layers with a window have another rotary base than layers without a window.
"""

from dataclasses import replace

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf.container import StoredArray
from mmengine.checkpoint.gguf.stored_lists import layer_flags
from mmengine.checkpoint.gguf.tensors import GGUFEntry

WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LOCAL_THETA = "rope.freq_base_swa"
KEYS = (PATTERN, LOCAL_THETA)
# Layer tensors that other architectures map differently: GGUF name -> transformers name.
PARTS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_KINDS = ("sliding_attention", "full_attention")
_EVERY = 6  # Every sixth layer has no window.
_LARGE = 62  # Number of layers of the 27 B model, whose attention scale depends on the hidden size.


def gemma_config(fields: Fields, config: dict[str, object]) -> dict[str, object]:
    """Return the fields of config.json that Gemma 3 adds to `config` or changes. Raises ModelError."""
    num_layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    assert isinstance(num_layers, int) and isinstance(rope, dict)
    local = fields.number(LOCAL_THETA, 10000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.integer(WINDOW, 1, 2**24) if WINDOW in fields.values else None,
        "layer_types": _layer_types(fields, num_layers),
        "query_pre_attn_scalar": _query_scalar(config),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    if WINDOW not in fields.values:
        return [_KINDS[1]] * num_layers
    if isinstance(fields.values.get(PATTERN), StoredArray):
        return [_KINDS[not has_window] for has_window in layer_flags(fields, PATTERN, num_layers)]
    every = fields.integer(PATTERN, 1, 1024, _EVERY)
    return [_KINDS[(layer + 1) % every == 0] for layer in range(num_layers)]


def _query_scalar(config: dict[str, object]) -> int:
    """Return query_pre_attn_scalar: attention scores are divided by its square root."""
    hidden, heads, head_dim = (config[name] for name in ("hidden_size", "num_attention_heads", "head_dim"))
    assert isinstance(hidden, int) and isinstance(heads, int) and isinstance(head_dim, int)
    return hidden // heads if config["num_hidden_layers"] == _LARGE else head_dim


def gemma_entry(entry: GGUFEntry) -> GGUFEntry:
    """Return the entry, changed so that the method `entry.pieces` yields transformers' values."""
    return replace(entry, adjust="less one") if entry.stored_name.endswith("norm.weight") else entry
