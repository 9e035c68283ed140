"""Finds transformers' config class and model class for a folder, and refuses models that cannot be served.
Reads only config.json. Downloads nothing, and never imports code from the folder.
"""

import json
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.errors import ModelError
from mmengine_transformers.config_values import check_values, without_implementations
from mmengine_transformers.media.rules import image_token_id

LAYER_KINDS = frozenset(["full_attention", "sliding_attention", "chunked_attention"])
# Fields that are true in models with cross attention.
CROSS_ATTENTION = (
    *("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"),
    "cross_layer_interval",  # Idefics 1.
)
# Model types whose attention masks depend on media in ways that media/rules.py describes.
KNOWN_MASKS = frozenset(["gemma3", "gemma4", "molmo2", "paligemma"])
# Arguments of a mask function, if the masks depend on media.
_KINDS = frozenset(["mm_token_type_ids", "token_type_ids", "block_sequence_ids"])
TIMM_TOWERS = frozenset(["timm_wrapper", "gemma3n_vision"])  # The vision config's model_type for timm towers.
MAX_CONFIG_CHARS = 800_000


def read_model(folder: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the config and the model class for a folder. Raises ModelError if this plugin cannot serve the
    model.
    """
    values = read_model_json(folder, "config.json")
    architecture = _architecture(folder, values)
    check_values(model_file(folder, "config.json"), values)
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ModelError(_unknown(folder, architecture, values))
    config = _config(folder, architecture, found, values)
    reason = why_not(found, config)
    if reason:
        raise ModelError(f"{folder} is a {architecture}, which cannot be served: {reason}")
    return config, found


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the decoder's config."""
    return config.get_text_config(decoder=True)


def _architecture(folder: Path, values: dict[str, object]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f'{folder / "config.json"} names no architecture: "architectures" must be a list')
    return names[0][:100]


def _unknown(folder: Path, architecture: str, values: dict[str, object]) -> str:
    version = transformers.__version__
    if values.get("auto_map") is not None:
        return (
            f"{folder} is a {architecture}, which transformers {version} does not have: the folder brings "
            "its own code, which is never run; install a version of transformers that has the class"
        )
    return f"{folder} is a {architecture}, for which transformers {version} has no class; update transformers"


def _config(
    folder: Path, architecture: str, model_class: type[PreTrainedModel], values: dict[str, Any]
) -> PreTrainedConfig:
    if len(json.dumps(values)) > MAX_CONFIG_CHARS:
        raise ModelError(f"{folder / 'config.json'} is too large for a model's config")
    kind = values.get("model_type")
    expected = model_class.config_class
    if expected is not None and kind in (None, expected.model_type):
        config_class = expected
    elif isinstance(kind, str) and kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
    else:
        raise ModelError(f"{folder / 'config.json'}: transformers has no model_type {str(kind)[:60]!r}")
    if expected is not None and not issubclass(config_class, expected):
        raise ModelError(
            f"{folder / 'config.json'}: model_type {str(kind)[:60]!r} does not belong to {architecture}"
        )
    plain = {name: value for name, value in values.items() if name not in ("auto_map", "quantization_config")}
    try:
        return config_class.from_dict(without_implementations(plain))
    except Exception as error:  # Config classes may raise any exception for unexpected values.
        raise ModelError(
            f"{folder / 'config.json'} is no config that {architecture} accepts: {_all_lines(error)}"
        ) from error


def _all_lines(error: Exception) -> str:
    """Return an error's text in a single line. transformers' validators write the reason into the second
    line.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def why_never(model_class: type[PreTrainedModel]) -> str:
    """Return, as a clause, why this plugin serves no model of this class, or "" for other classes."""
    if "shared_kv_states" in _parameters(model_class.forward):
        return "it drafts tokens for another model, whose KV it reads"
    return ""


def why_not(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return the reason why this plugin cannot serve a model, as a clause, or ""."""
    if reason := why_never(model_class):
        return reason
    text = text_config(config)
    if _any(config, "is_encoder_decoder") or _any(text, *CROSS_ATTENTION):
        return "it is an encoder-decoder or has cross attention, and only decoders are served"
    if "Diffusion" in model_class.__name__ or _any(text, "diffusion", "block_diffusion"):
        return "it denoises blocks of tokens instead of generating one token after another"
    if getattr(getattr(config, "vision_config", None), "model_type", "") in TIMM_TOWERS:
        return "its image tower is a model of timm, which cannot be loaded"
    make_masks = getattr(model_class, "create_masks_for_generate", None)
    if make_masks and config.model_type not in KNOWN_MASKS and _KINDS & _parameters(make_masks):
        return "its attention masks depend on the kinds of tokens by a rule that mmengine does not know"
    if not model_class.can_generate():
        return "it has no language model head"
    if getattr(model_class, "_is_stateful", False):
        return "it has recurrent layers, whose states bypass the attention function"
    kinds = getattr(text, "layer_types", None) or ()
    strange = sorted({str(kind)[:40] for kind in kinds} - LAYER_KINDS)
    if strange:
        return f"its layers {', '.join(strange)} bypass the attention function"
    if not model_class._supports_attention_backend:
        return "its modules do not call transformers' attention interface"
    return _media_reason(config) or _rotary_reason(text)


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(signature(function).parameters)


def _media_reason(config: PreTrainedConfig) -> str:
    """Return why the media of a model cannot be served, or ""."""
    kinds = {name for name in config.sub_configs if getattr(config, name, None) is not None}
    if not kinds & {"vision_config", "vq_config"}:
        return "it takes audio instead of images" if "audio_config" in kinds else ""
    if image_token_id(config) is None:
        return "it takes images, and its config names no token that stands for an image's embeddings"
    return ""


def _any(config: PreTrainedConfig, *names: str) -> bool:
    return any(bool(getattr(config, name, None)) for name in names)


def rotary_kinds(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield each dict of rotary parameters in a decoder's config. Each layer type may have its own dict."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict):
        return
    inner = [each for each in found.values() if isinstance(each, dict) and "rope_type" in each]
    yield from inner or [found]


def rotary_limit(config: PreTrainedConfig) -> int:
    """Return the row length up to which the rotary factors are fixed. A longer row changes the factors for
    its whole batch. Returns 0 if the factors never change, and -1 if the config lacks the length.
    """
    limits = []
    for each in rotary_kinds(config):
        kind = each.get("rope_type", each.get("type"))
        if kind == "longrope" or (kind == "dynamic" and not each.get("alpha")):
            original = each.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
            if kind == "dynamic":
                limits[-1] = limits[-1] or config.max_position_embeddings
    return min((int(limit or -1) for limit in limits), default=0)


def _rotary_reason(config: PreTrainedConfig) -> str:
    if rotary_limit(config) < 0:
        return (
            "its rotary factors depend on the longest row of a call, and the config has no "
            "original_max_position_embeddings below which they are fixed"
        )
    return ""
