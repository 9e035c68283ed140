"""Reads and checks config.json of Qwen3-VL, for dense models and mixtures of experts.

Accepts the style of hub files (`rope_scaling` and `rope_theta`) and the style of transformers 5
(`rope_parameters`). Fields with a default in transformers may be missing, except sizes such as hidden_size
and num_hidden_layers.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.checkpoint.rope import RopeConfig
from mmengine.models.config import NetworkConfig
from mmengine.models.config_reader import check_served, read_decoder, read_experts
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.vision.config import VisionConfig

DENSE, MIXTURE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
ARCHITECTURES = (DENSE, MIXTURE)
VISION_ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}  # Name -> `approximate` of F.gelu.
_ROPE_TYPES = ("default", "mrope")  # "mrope" is an old name for "default".


@dataclass(frozen=True, slots=True)
class ModelConfig(NetworkConfig):
    vision: VisionConfig
    image_token_id: int
    video_token_id: int


def read_config(folder: Path) -> ModelConfig:
    """Return the model's sizes and constants from the files in `folder`. Raises ModelError, which names the
    file and the field.
    """
    root = Fields(read_model_json(folder, "config.json"), model_file(folder, "config.json"), "")
    check_served(root, ARCHITECTURES, ("text_config", "vision_config"))
    text = _text_config(root)
    vision = read_vision(root.child("vision_config"))
    if vision.out_hidden_size != text.hidden_size:
        root.fail(
            f"vision_config.out_hidden_size {vision.out_hidden_size} differs from "
            f"text_config.hidden_size {text.hidden_size}"
        )
    if len(vision.deepstack_layers) > text.num_layers:
        root.fail("vision_config.deepstack_visual_indexes has more entries than the text model has layers")
    return ModelConfig(
        text=text,
        vision=vision,
        image_token_id=root.integer("image_token_id", 0, text.vocab_size - 1, 151655),
        video_token_id=root.integer("video_token_id", 0, text.vocab_size - 1, 151656),
    )


def _text_config(root: Fields) -> DecoderConfig:
    text = root.child("text_config")
    biased = text.flag("attention_bias", False)
    is_mixture = DENSE not in root.values["architectures"]
    if is_mixture and not text.flag("norm_topk_prob", True):
        text.fail("text_config.norm_topk_prob is false; Qwen3-VL always divides by the sum")
    return read_decoder(
        text,
        tied=root.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        head_dim=None if is_mixture else 128,
        rope=text_rope,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        experts=read_experts(text, norm_top_k=True) if is_mixture else None,
    )


def text_rope(
    text: Fields, head_dim: int, sections: tuple[int, ...] = (24, 20, 20), theta: float = 500000.0
) -> RopeConfig:
    """Read the rotary embedding from either style of config.

    `head_dim`: number of rotated values per head. `sections`, `theta`: the values to use if the file has
    none.
    """
    modern = text.values.get("rope_parameters") is not None
    rope = text.child("rope_parameters" if modern else "rope_scaling", optional=True)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in _ROPE_TYPES:
        text.fail(f"{rope.prefix}rope_type {repr(kind)[:60]} is not supported, only default")
    if not rope.flag("mrope_interleaved", True):
        text.fail(f"{rope.prefix}mrope_interleaved is false; this family interleaves")
    section = rope.integers("mrope_section", list(sections), 0, 512, 3)
    if len(section) != 3 or head_dim % 2 or sum(section) != head_dim // 2:
        text.fail(
            f"{rope.prefix}mrope_section is {list(section)}; it must be three numbers whose sum is half "
            f"of a head's {head_dim} rotated values"
        )
    theta_fields = rope if "rope_theta" in rope.values else text
    return RopeConfig(theta_fields.number("rope_theta", theta), sections=section, interleaved=True)


def read_vision(vision: Fields, *, deepstack: bool = True) -> VisionConfig:
    """Read the vision tower's sizes. `deepstack`: whether the file must name the layers with deepstack
    outputs.
    """
    depth = vision.integer("depth", 1, 1024)
    num_heads = vision.integer("num_heads", 1, 1024)
    hidden_size = vision.integer("hidden_size", 1, 2**17)
    num_positions = vision.integer("num_position_embeddings", 1, 2**20)
    activation = vision.values.get("hidden_act", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in VISION_ACTIVATIONS:
        names = " and ".join(VISION_ACTIVATIONS)
        vision.fail(f"vision_config.hidden_act {repr(activation)[:60]} is not supported, only {names}")
    if hidden_size % num_heads or hidden_size // num_heads % 4:
        vision.fail(f"vision_config: hidden_size {hidden_size} over {num_heads} heads is not a multiple of 4")
    if math.isqrt(num_positions) ** 2 != num_positions:
        vision.fail(f"vision_config.num_position_embeddings {num_positions} is not a square number")
    rope = vision.child("rope_parameters", optional=True)
    if rope.values.get("rope_type", "axial") != "axial":
        vision.fail(
            f"{rope.prefix}rope_type {repr(rope.values['rope_type'])[:60]} is not supported, only axial"
        )
    layers = vision.integers("deepstack_visual_indexes", None if deepstack else [], 0, depth - 1, depth)
    if len(set(layers)) != len(layers):
        vision.fail(f"vision_config.deepstack_visual_indexes names a layer twice: {list(layers)}")
    return VisionConfig(
        depth=depth,
        hidden_size=hidden_size,
        intermediate_size=vision.integer("intermediate_size", 1, 2**20),
        num_heads=num_heads,
        out_hidden_size=vision.integer("out_hidden_size", 1, 2**17),
        in_channels=vision.integer("in_channels", 1, 16, 3),
        patch_size=vision.integer("patch_size", 1, 256, 16),
        temporal_patch_size=vision.integer("temporal_patch_size", 1, 16, 2),
        merge_size=vision.integer("spatial_merge_size", 1, 16, 2),
        num_positions=num_positions,
        rope_theta=rope.number("rope_theta", 10000.0),
        norm_eps=1e-6,  # A constant that the file does not contain.
        gelu=VISION_ACTIVATIONS[activation],
        deepstack_layers=layers,
    )
