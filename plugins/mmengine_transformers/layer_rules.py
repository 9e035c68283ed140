"""Adds to each layer's attention what no argument of an attention call tells: chunks, and which tokens of
media see one another.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from mmengine.models.spec import LayerAttention
from mmengine_transformers.classes import text_config
from mmengine_transformers.media.rules import media_rules


def with_rules(layers: tuple[LayerAttention, ...], config: PreTrainedConfig) -> tuple[LayerAttention, ...]:
    """Return the layers of a model with this config, with their chunks and `sees_runs`."""
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
    """Return how many positions have the temperature 1 in layers without rotary positions; 0: all.

    transformers counts the positions of Llama 4's temperature from the start of a call.
    """
    text = text_config(config)
    tuned = bool(getattr(text, "attn_temperature_tuning", None))
    return int(getattr(text, "floor_scale", None) or 0) - 1 if tuned else 0
