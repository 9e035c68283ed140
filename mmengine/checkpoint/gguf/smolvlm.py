"""Reads SmolVLM2 projectors, which have the type idefics3 in GGUF files."""

from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.config import IDEFICS3
from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.projector import Json
from mmengine.checkpoint.gguf.siglip import EPS, SiglipProjector
from mmengine.checkpoint.gguf.tokenizer import token_id

TILES, VIDEO_FPS, VIDEO_FRAMES = 4, 1, 64  # Constants of SmolVLM2's processor files.
WRITTEN_EPS = 1e-5  # The converter writes this value if the model's config has no epsilon.


@dataclass(frozen=True, slots=True)
class SmolVLMProjector(SiglipProjector):
    """A projector for SmolVLM2."""

    kind = IDEFICS3
    layers = "model.vision_model.encoder.layers"
    places: ClassVar[dict[str, str]] = {
        "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
        "v.position_embd": "model.vision_model.embeddings.position_embedding",
        "v.post_ln": "model.vision_model.post_layernorm",
        "mm.model.fc": "model.connector.modality_projection.proj",
    }

    def model_config(self, text: Json, container: Container) -> Json:
        self.check_tensors()
        fields = self.fields()
        vision = {"model_type": "smolvlm_vision", **self.tower_config()}
        if self._has_written_eps():
            vision["layer_norm_eps"] = EPS
        return {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "tie_word_embeddings": text["tie_word_embeddings"],
            "scale_factor": fields.integer("projector.scale_factor", 1, 16),
            "image_token_id": token_id(container, "<image>"),
            "text_config": text,
            "vision_config": vision,
        }

    def settings(self) -> dict[str, Json]:
        side = {"longest_edge": self.image_size()}
        edge = self.fields().integer("preproc_image_size", 1, 4096, TILES * self.image_size())
        sampling = {"fps": VIDEO_FPS, "max_frames": VIDEO_FRAMES, "video_size": side}
        found = {**self.normalisation(), "max_image_size": side, "size": {"longest_edge": edge}}
        return {"preprocessor_config.json": {**found, "video_sampling": sampling}}

    def limits_text(self) -> str:
        eps = ", and norms with epsilon 1e-06 as in transformers" if self._has_written_eps() else ""
        return f"projector {self.path.name} with the video sampling of SmolVLM2's processor{eps}"

    def text_name(self, name: str) -> str:
        return name.replace("model.", "model.text_model.", 1) if name.startswith("model.") else name

    def _has_written_eps(self) -> bool:
        """Return whether the file's epsilon is WRITTEN_EPS, up to rounding."""
        return abs(self.eps() / WRITTEN_EPS - 1) < 0.01
