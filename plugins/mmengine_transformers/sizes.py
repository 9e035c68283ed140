"""Determines a model's sizes without loading weights, for `mmengine model check`."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from mmengine.errors import ModelError
from mmengine.models.spec import ModelSpec
from mmengine_transformers.calls import pool_heads
from mmengine_transformers.classes import read_model, text_config
from mmengine_transformers.media.opening import open_media
from mmengine_transformers.media.rules import media_rules
from mmengine_transformers.network import record_layers, spec_of
from mmengine_transformers.parts import parts_of
from mmengine_transformers.weights import build_empty


def describe(folder: Path) -> ModelSpec:
    """Return the sizes of a folder's model, from a run of its decoder on the meta device. If the run fails
    because operations need values, the sizes come only from the config. Raises ModelError for an unsupported
    model or processor.
    """
    config, model_class = read_model(folder)
    media = open_media(folder, config)
    parts = parts_of(build_empty(model_class, config, torch.bfloat16))
    try:
        with torch.inference_mode():
            calls, layers = record_layers(parts, torch.device("meta"))
    except ModelError:
        raise
    except Exception:  # A mixture of experts fails, because meta tensors have no values.
        return _from_config(config)
    spec = spec_of(parts, pool_heads(model_class.__name__, calls), layers)
    return spec if media is None else replace(spec, runs=media_rules(config).runs)


def _from_config(config: PreTrainedConfig) -> ModelSpec:
    text, rules = text_config(config), media_rules(config)
    num_heads = text.num_attention_heads
    return ModelSpec(
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_model_len=int(getattr(text, "max_position_embeddings", None) or 4096),
        num_deepstack=0,
        patch_width=0,
        atomic_runs=rules.atomic_runs,
        whole_prompt=rules.whole_prompt,
    )
