"""Defines a model's sizes and options as plain data, which a plugin reads from config.json."""

from dataclasses import dataclass

from mmengine.models.decoder.config import DecoderConfig, DeltaConfig
from mmengine.models.plugin import ModelSpec
from mmengine.models.states import StateSpec
from mmengine.models.vision.config import VisionConfig


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """The sizes and options of a model's text decoder and vision tower."""

    text: DecoderConfig
    vision: VisionConfig | None  # None if the model has no vision tower.


def make_spec(config: NetworkConfig) -> ModelSpec:
    """Return the sizes in the form that the runtime and the scheduler need."""
    text, vision = config.text, config.vision
    return ModelSpec(
        num_layers=text.num_layers,
        num_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_model_len=text.max_positions,
        num_deepstack=len(vision.deepstack_layers) if vision else 0,
        patch_width=vision.patch_width if vision else 0,
        merge_size=vision.merge_size if vision else 1,
        state=_state_spec(text.delta) if text.delta is not None else None,
    )


def _state_spec(delta: DeltaConfig) -> StateSpec:
    sizes = (delta.width, delta.taps, delta.num_heads, delta.key_dim, delta.value_dim)
    return StateSpec(len(delta.layers), *sizes)
