"""Reads the GGUF fields that all Qwen-VL projectors share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.config import text_fields
from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.projector import PATCHES, Json, Projector
from mmengine.checkpoint.gguf.stored_lists import rope_sections
from mmengine.checkpoint.gguf.tokenizer import token_id


@dataclass(frozen=True, slots=True)
class QwenProjector(Projector):
    """A projector of a Qwen-VL family.

    `title`: the family's name in messages. `images`: the image limits in pixels, from the family's processor
    files on the hub, because GGUF files contain no limits.
    """

    title: ClassVar[str]
    images: ClassVar[Mapping[str, int]]

    def limits_text(self) -> str:
        low, high = self.images.values()
        limits = f"the pixel limits of {self.title}'s processor ({low:,} to {high:,})"
        return f"projector {self.path.name} with {limits}"

    def tower_config(self) -> Json:
        """Return the fields of vision_config that all families have. Raises ModelError."""
        self.check_tensors(PATCHES)
        fields, tensors = self.fields(), self.container.tensors
        eps = fields.number("attention.layer_norm_epsilon", 1e-6)
        if not 0.99e-6 < eps < 1.01e-6:
            fields.fail(f"{fields.prefix}attention.layer_norm_epsilon is {eps:g}; {self.title} has 1e-06")
        shape = tensors[PATCHES].shape
        return {
            "depth": fields.integer("block_count", 1, 1024),
            "num_heads": fields.integer("attention.head_count", 1, 1024),
            "in_channels": shape[1] if len(shape) == 4 else 3,
            "patch_size": fields.integer("patch_size", 1, 256),
            "temporal_patch_size": 2 if f"{PATCHES}.1" in tensors else 1,
            "spatial_merge_size": fields.integer("spatial_merge_size", 1, 16, 2),
        }


def media_text_config(text: Json, container: Container, model_type: str, **more: object) -> Json:
    """Return text_config with M-RoPE's sections.

    `model_type`: the vision model's type. `more`: further rotary options. Raises ModelError.
    """
    rope = text["rope_parameters"]
    assert isinstance(rope, dict)
    rope = rope | {"mrope_section": rope_sections(text_fields(container)), **more}
    return text | {"rope_parameters": rope, "model_type": f"{model_type}_text"}


def media_token_ids(container: Container) -> Json:
    """Return the ids of the tokens that stand for images and videos. Raises ModelError."""
    return {f"{name}_token_id": token_id(container, f"<|{name}_pad|>") for name in ("image", "video")}
