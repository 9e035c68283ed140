"""Reads three attention rules from the config, because attention calls do not show these rules: the chunk
size, whether media tokens see one another, and the last position with attention temperature 1.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from mmengine.models.spec import LayerAttention
from mmengine_transformers.classes import text_config
from mmengine_transformers.media.rules import media_rules


def with_rules(layers: tuple[LayerAttention, ...], config: PreTrainedConfig) -> tuple[LayerAttention, ...]:
    """Return the layers with `chunk` and `sees_runs` from the config."""
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
    """Return the number of positions with attention temperature 1 in layers without rotary positions, or 0 if
    all positions have temperature 1. Later positions are not supported, because transformers counts positions
    from the start of each call (Llama 4).
    """
    text = text_config(config)
    tuned = bool(getattr(text, "attn_temperature_tuning", None))
    return int(getattr(text, "floor_scale", None) or 0) - 1 if tuned else 0
