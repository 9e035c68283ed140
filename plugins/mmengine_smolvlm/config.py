"""Reads and checks config.json of SmolVLM2. For missing fields, this module uses transformers' defaults."""

from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.model_files import model_file, read_model_json
from mmengine.models.config import NetworkConfig
from mmengine.models.config_reader import check_served, read_decoder
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.vision.config import VisionConfig

ARCHITECTURE = "SmolVLMForConditionalGeneration"
VISION_ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}  # Name -> `approximate` of F.gelu.
_TEXT_MODEL = "llama"
_TEXT_SIZES = {  # The defaults of LlamaConfig.
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True)
class ModelConfig(NetworkConfig):
    """The sizes and constants of a SmolVLM2 model. `image_size`: a tile's side length in pixels."""

    vision: VisionConfig
    image_token_id: int
    image_size: int

    @property
    def tile_embeds(self) -> int:
        return self.vision.num_positions // self.vision.merge_size**2


def read_config(folder: Path) -> ModelConfig:
    """Return the model's sizes and constants from the files in `folder`. Raises ModelError, which names the
    file and the field.
    """
    root = Fields(read_model_json(folder, "config.json"), model_file(folder, "config.json"), "")
    check_served(root, (ARCHITECTURE,), ("text_config", "vision_config"))
    text = _text_config(root)
    vision, image_size = _vision_config(root, text.hidden_size)
    return ModelConfig(
        text=text,
        vision=vision,
        image_token_id=root.integer("image_token_id", 0, text.vocab_size - 1, 128257),
        image_size=image_size,
    )


def _text_config(root: Fields) -> DecoderConfig:
    said = root.child("text_config")
    kind = said.values.get("model_type", _TEXT_MODEL)
    if kind != _TEXT_MODEL:
        root.fail(f"text_config.model_type {repr(kind)[:60]} is not supported, only {_TEXT_MODEL}")
    for name, size in _TEXT_SIZES.items():
        if said.values.get(name) is None:
            said.values[name] = size
    biased = said.flag("attention_bias", False)
    return read_decoder(
        said,
        tied=root.flag("tie_word_embeddings", False),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=said.flag("mlp_bias", False),
    )


def _vision_config(root: Fields, out_hidden_size: int) -> tuple[VisionConfig, int]:
    """Return the vision tower's description, and a tile's side length in pixels."""
    vision = root.child("vision_config")
    hidden_size = vision.integer("hidden_size", 1, 2**17, 1152)
    num_heads = vision.integer("num_attention_heads", 1, 1024, 16)
    image_size = vision.integer("image_size", 1, 4096, 224)
    patch_size = vision.integer("patch_size", 1, 256, 32)
    merge_size = root.integer("scale_factor", 1, 16, 2)
    side = image_size // patch_size
    if hidden_size % num_heads or hidden_size // num_heads % 4:
        vision.fail(f"vision_config: hidden_size {hidden_size} over {num_heads} heads is not a multiple of 4")
    if not side or side % merge_size:
        vision.fail(
            f"scale_factor {merge_size} does not divide the {side} patches of a tile's side, "
            f"vision_config.image_size {image_size} over patch_size {patch_size}"
        )
    activation = vision.values.get("hidden_act", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in VISION_ACTIVATIONS:
        names = " and ".join(VISION_ACTIVATIONS)
        vision.fail(f"vision_config.hidden_act {repr(activation)[:60]} is not supported, only {names}")
    config = VisionConfig(
        depth=vision.integer("num_hidden_layers", 1, 1024, 12),
        hidden_size=hidden_size,
        intermediate_size=vision.integer("intermediate_size", 1, 2**20, 3072),
        num_heads=num_heads,
        out_hidden_size=out_hidden_size,
        in_channels=vision.integer("num_channels", 3, 3, 3),
        patch_size=patch_size,
        temporal_patch_size=1,
        patches_have_time=False,
        merge_size=merge_size,
        num_positions=side**2,
        rope_theta=None,
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        gelu=VISION_ACTIVATIONS[activation],
        deepstack_layers=(),
        joined_qkv=False,
        linear_merger=True,
    )
    return config, image_size
