"""Reads and checks config.json of Qwen3.5 and of later models with the same architecture.

The file contains `text_config` and `vision_config`, or only the fields of a text model. The model is dense,
or a mixture of experts with a shared expert in every layer. Fields with a default in transformers may be
missing, except sizes such as hidden_size and num_hidden_layers.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.checkpoint.rope import RopeConfig
from mmengine.models.config import NetworkConfig
from mmengine.models.config_reader import MAX_LAYERS, check_served, read_decoder, read_mixture
from mmengine.models.decoder.config import DecoderConfig, DeltaConfig, ExpertsConfig
from mmengine.models.vision.config import VisionConfig
from mmengine_qwen3_vl.config import read_vision, text_rope

WITH_MEDIA = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
TEXT_ALONE = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
MIXTURES = (WITH_MEDIA[1], TEXT_ALONE[1])
ARCHITECTURES = (*WITH_MEDIA, *TEXT_ALONE)
LINEAR, FULL = "linear_attention", "full_attention"
IMAGE_TOKEN, VIDEO_TOKEN = 248056, 248057  # Default token ids, used if the file names none.


@dataclass(frozen=True, slots=True)
class ModelConfig(NetworkConfig):
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int


def read_config(folder: Path) -> ModelConfig:
    """Return the model's sizes and constants from a folder or a GGUF file. Raises ModelError, which names the
    file and the field.
    """
    root = _root(folder)
    check_served(root, ARCHITECTURES, ("text_config", "vision_config") if _has_text_config(root) else ())
    fields = _text_fields(root)
    tied = root.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False))
    architecture = next(name for name in root.values["architectures"] if name in ARCHITECTURES)
    text, vision = _text_config(fields, tied, is_mixture=architecture in MIXTURES), None
    if architecture in WITH_MEDIA:
        vision = read_vision(root.child("vision_config"), deepstack=False)
        if vision.deepstack_layers:
            root.fail("vision_config.deepstack_visual_indexes is not empty; this family has no deepstack")
        if vision.out_hidden_size != text.hidden_size:
            root.fail(
                f"vision_config.out_hidden_size {vision.out_hidden_size} differs from "
                f"text_config.hidden_size {text.hidden_size}"
            )
    return ModelConfig(
        text=text,
        vision=vision,
        image_token_id=root.integer("image_token_id", 0, 2**31 - 1, IMAGE_TOKEN),
        video_token_id=root.integer("video_token_id", 0, 2**31 - 1, VIDEO_TOKEN),
    )


def read_head(folder: Path, text: DecoderConfig) -> DecoderConfig | None:
    """Return the decoder config for the checkpoint's multi-token-prediction head, or None if the head has 0
    layers.

    `text`: the model's decoder. Raises ModelError for a head of an unsupported kind.
    """
    fields = _text_fields(_root(folder))
    count = fields.integer("mtp_num_hidden_layers", 0, MAX_LAYERS, 1)
    if not count:
        return None
    if count > 1:
        fields.fail(f"{fields.prefix}mtp_num_hidden_layers is {count}; heads with one layer are supported")
    if fields.flag("mtp_use_dedicated_embeddings", False):
        fields.fail(
            f"{fields.prefix}mtp_use_dedicated_embeddings is true; only the model's embedding is supported"
        )
    experts = None if text.experts is None else replace(text.experts, layers=(0,))
    return replace(text, num_layers=1, delta=None, experts=experts)


def _root(folder: Path) -> Fields:
    return Fields(read_model_json(folder, "config.json"), model_file(folder, "config.json"), "")


def _has_text_config(root: Fields) -> bool:
    return root.values.get("text_config") is not None


def _text_fields(root: Fields) -> Fields:
    return root.child("text_config") if _has_text_config(root) else root


def _text_config(text: Fields, tied: bool, *, is_mixture: bool) -> DecoderConfig:
    if text.flag("attention_bias", False):
        text.fail(f"{text.prefix}attention_bias is true, which is not supported with gated attention")
    head_dim = text.integer("head_dim", 2, 1024, 256)
    share = _rotary_share(text)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        text.fail(
            f"{text.prefix}partial_rotary_factor {share:g} of head_dim {head_dim} is not an even number"
        )
    kinds = _layer_types(text)
    decoder = read_decoder(
        text,
        tied=tied,
        head_dim=256,
        rope=lambda fields, _: _rope(fields, rotary_dim),
        qk_norm=True,
        experts=_experts(text) if is_mixture else None,
        mixers=(LINEAR, FULL),
    )
    delta = DeltaConfig(
        layers=frozenset(index for index, kind in enumerate(kinds) if kind == LINEAR),
        num_key_heads=text.integer("linear_num_key_heads", 1, 1024, 16),
        num_heads=text.integer("linear_num_value_heads", 1, 1024, 32),
        key_dim=text.integer("linear_key_head_dim", 1, 1024, 128),
        value_dim=text.integer("linear_value_head_dim", 1, 1024, 128),
        taps=text.integer("linear_conv_kernel_dim", 2, 16, 4),
        tiled=text.flag("linear_value_heads_tiled", False),  # Only for GGUF files.
    )
    if delta.num_heads % delta.num_key_heads:
        text.fail(
            f"{text.prefix}linear_num_value_heads {delta.num_heads} are not shared evenly by "
            f"linear_num_key_heads {delta.num_key_heads}"
        )
    return replace(
        decoder,
        rotary_dim=rotary_dim,
        gated=True,
        norm_offset=True,
        delta=delta if delta.layers else None,
    )


def _experts(text: Fields) -> ExpertsConfig:
    """Read the experts' sizes. Every layer has experts.

    Ignores `decoder_sparse_step` and `mlp_only_layers`, which select the layers with experts in other models.
    """
    if not text.flag("norm_topk_prob", True):
        text.fail(f"{text.prefix}norm_topk_prob is false; this family always divides by the sum")
    layers = tuple(range(text.integer("num_hidden_layers", 1, MAX_LAYERS)))
    experts = read_mixture(text, layers, norm_top_k=True)
    return replace(experts, shared_size=text.integer("shared_expert_intermediate_size", 1, 2**20))


def _layer_types(text: Fields) -> list[str]:
    """Return each layer's type. By default, every fourth layer has full attention, and all others have
    linear attention.
    """
    count = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = text.values.get("layer_types")
    if kinds is None:
        every = text.integer("full_attention_interval", 1, 1024, 4)
        kinds = [FULL if (index + 1) % every == 0 else LINEAR for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        text.fail(f"{text.prefix}layer_types must name {LINEAR} or {FULL} for each of {count} layers")
    if FULL not in kinds:
        text.fail(f"{text.prefix}layer_types has no {FULL}; a model without any is not supported")
    return kinds


def _rotary_share(text: Fields) -> float:
    rope = text.child("rope_parameters", optional=True)
    fields = rope if rope.values.get("partial_rotary_factor") is not None else text
    return fields.number("partial_rotary_factor", 0.25)


def _rope(text: Fields, rotary_dim: int) -> RopeConfig:
    return text_rope(text, rotary_dim, sections=(11, 11, 10), theta=10000.0)
