"""Reads the attention rules that are in the config, but in no argument to an attention call. The rules are
the chunk size, whether media tokens see one another, and the position up to which the attention temperature
is 1.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from mmengine.models.spec import LayerAttention
from mmengine_transformers.classes import text_config
from mmengine_transformers.media.rules import media_rules


def with_rules(layers: tuple[LayerAttention, ...], config: PreTrainedConfig) -> tuple[LayerAttention, ...]:
    """Return the layers with their `chunk` and `sees_runs`, which the config determines."""
    rules, text = media_rules(config), text_config(config)
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    size = int(getattr(text, "attention_chunk_size", None) or 0)
    return tuple(
        replace(
            layer,
            chunk=size if kind == "chunked_attention" else 0,
            sees_runs=bool(rules.runs) and (layer.window > 0 or not rules.only_windows),
        )
        for layer, kind in zip(layers, kinds, strict=True)
    )


def temperature_limit(config: PreTrainedConfig) -> int:
    """Return the number of positions whose attention temperature is 1 in layers without rotary positions.

    Returns 0 if the temperature is 1 at all positions.

    Later positions cannot be served, because transformers counts positions from the start of each call (Llama
    4).
    """
    text = text_config(config)
    tuned = bool(getattr(text, "attn_temperature_tuning", None))
    return int(getattr(text, "floor_scale", None) or 0) - 1 if tuned else 0
