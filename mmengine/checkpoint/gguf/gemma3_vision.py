"""Reads the projector (vision tower) file of a Gemma 3 GGUF model. transformers' modules run the model."""

from dataclasses import dataclass, replace
from typing import ClassVar

from mmengine.checkpoint.gguf.config import GEMMA3
from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.projector import Json
from mmengine.checkpoint.gguf.siglip import SiglipProjector
from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.gguf.tokenizer import token_id

# Special tokens that transformers' processor reads from the tokenizer's settings.
SPECIAL = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
POOLED = 4  # Default side length of a square in patches; each square is pooled to an embedding.
# In transformers, the name of the projector's matrix does not end with ".weight".
_MATRIX = {"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"}
_NORM = "mm.soft_emb_norm"


@dataclass(frozen=True, slots=True)
class Gemma3Projector(SiglipProjector):
    """A projector for Gemma 3: a SigLIP tower, a pooling over squares of patches, a norm and a matrix."""

    kind = GEMMA3
    layers = "vision_tower.encoder.layers"
    places: ClassVar[dict[str, str]] = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        _NORM: "multi_modal_projector.mm_soft_emb_norm",
    }

    def model_config(self, text: Json, container: Container) -> Json:
        self.check_tensors()
        vision = {"model_type": "siglip_vision_model", **self.tower_config(), "vision_use_head": False}
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "tie_word_embeddings": text["tie_word_embeddings"],
            "mm_tokens_per_image": self._num_tokens(),
            "image_token_index": token_id(container, SPECIAL["image_token"]),
            "boi_token_index": token_id(container, SPECIAL["boi_token"]),
            "eoi_token_index": token_id(container, SPECIAL["eoi_token"]),
            "text_config": text,
            "vision_config": vision,
        }

    def settings(self) -> dict[str, Json]:
        side = self.image_size()
        image = {
            **self.normalisation(),
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
        }
        return {
            "preprocessor_config.json": image,
            "processor_config.json": {
                "processor_class": "Gemma3Processor",
                "image_seq_length": self._num_tokens(),
            },
        }

    def tokenizer_settings(self) -> Json:
        return dict(SPECIAL)

    def limits_text(self) -> str:
        return f"projector {self.path.name}: an image becomes {self._num_tokens()} tokens"

    def name_of(self, stored: str) -> str:
        return _MATRIX.get(stored) or SiglipProjector.name_of(self, stored)

    def text_name(self, name: str) -> str:
        return f"language_model.{name}"

    def tensors(self) -> dict[str, GGUFEntry]:
        """Return every tensor by its transformers name. The file stores the projector's norm plus 1, so the
        returned norm subtracts 1.
        """
        found = SiglipProjector.tensors(self)
        norm = f"{self.places[_NORM]}.weight"
        if norm in found:
            found[norm] = replace(found[norm], adjust="less one")
        return found

    def _num_tokens(self) -> int:
        """Return the number of embeddings per image. Raises ModelError if the image's size is not a multiple
        of the squares' size.
        """
        fields, side = self.fields(), self.image_size()
        patch = fields.integer("patch_size", 1, 256)
        pooled = fields.integer("projector.scale_factor", 1, 64, POOLED)
        if side % (patch * pooled):
            fields.fail(f"{fields.prefix}image_size is {side}, not a multiple of {pooled} patches of {patch}")
        return (side // patch // pooled) ** 2
