"""Reads the GGUF projector (vision tower) for a Qwen3-VL or Qwen3.5 model."""

import re
from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.config import DEEPSTACK, QWEN3_VL, text_fields
from mmengine.checkpoint.gguf.container import Container, StoredArray
from mmengine.checkpoint.gguf.projector import MAX_SIZE, POSITIONS, Json
from mmengine.checkpoint.gguf.qwen_vl import QwenProjector, media_text_config, media_token_ids

VIDEOS = {"shortest_edge": 4096, "longest_edge": 25165824}  # Limits on a video's pixels, all frames together.
_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_DEEP = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
# model_type of a hybrid text model -> architecture of the vision-language model.
_HYBRIDS = {
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
}


@dataclass(frozen=True, slots=True)
class Qwen3VLProjector(QwenProjector):
    """A projector for Qwen3-VL, or for Qwen3.5, which has the same tower without deepstack layers."""

    kind = QWEN3_VL
    title = "Qwen3-VL"
    images: ClassVar[dict[str, int]] = {"shortest_edge": 65536, "longest_edge": 16777216}
    layers = "model.visual.blocks"
    parts: ClassVar[dict[str, str]] = {
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ln1": "norm1",
        "ln2": "norm2",
        "ffn_up": "mlp.linear_fc1",
        "ffn_down": "mlp.linear_fc2",
    }
    places: ClassVar[dict[str, str]] = {
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.position_embd": "model.visual.pos_embed",
        "v.post_ln": "model.visual.merger.norm",
        "mm.0": "model.visual.merger.linear_fc1",
        "mm.2": "model.visual.merger.linear_fc2",
    }

    def model_config(self, text: Json, container: Container) -> Json:
        fields, vision = text_fields(container), self._vision_config()
        if text["model_type"] in _HYBRIDS:
            return self._hybrid_config(text, vision, container)
        layers = self._deepstack_layers()
        if (wanted := fields.integer(DEEPSTACK, 0, 1024, len(layers))) != len(layers):
            fields.fail(
                f"{fields.prefix}{DEEPSTACK} is {wanted}, but {self.path} has {len(layers)} deepstack "
                "layers: it is the projector of another model"
            )
        model = "Qwen3VLMoe" if text["model_type"] == "qwen3_moe" else "Qwen3VL"
        model_type = "qwen3_vl_moe" if text["model_type"] == "qwen3_moe" else "qwen3_vl"
        return {
            "architectures": [f"{model}ForConditionalGeneration"],
            "model_type": model_type,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": media_text_config(text, container, model_type, mrope_interleaved=True),
            "vision_config": vision | {"model_type": model_type},
            **media_token_ids(container),
        }

    def _hybrid_config(self, text: Json, vision: Json, container: Container) -> Json:
        """Return the config of a Qwen3.5 model. `text` already has the rotary sections."""
        model_type = str(text["model_type"])
        return {
            "architectures": [_HYBRIDS[model_type]],
            "model_type": model_type.removesuffix("_text"),
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text,
            "vision_config": vision,
            **media_token_ids(container),
        }

    def settings(self) -> dict[str, Json]:
        common = self.normalisation()
        return {
            "preprocessor_config.json": {**common, "size": dict(self.images)},
            "video_preprocessor_config.json": {**common, "size": dict(VIDEOS)},
        }

    def name_of(self, stored: str) -> str:
        if (found := _DEEP.fullmatch(stored)) is None:
            return QwenProjector.name_of(self, stored)
        layers, layer, (step, ending) = self._deepstack_layers(), int(found[1][:9]), found.group(2, 3)
        if layer not in layers or step not in _DEEPSTACK:
            return stored
        return f"model.visual.deepstack_merger_list.{layers.index(layer)}.{_DEEPSTACK[step]}.{ending}"

    def _vision_config(self) -> Json:
        self.check_tensors()
        hidden = self.fields().integer("embedding_length", 1, MAX_SIZE)
        return self.tower_config() | {
            "model_type": "qwen3_vl",
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size(hidden),
            "out_hidden_size": self.out_hidden_size,
            "num_position_embeddings": self.container.tensors[POSITIONS].shape[0],
            "deepstack_visual_indexes": self._deepstack_layers(),
            "hidden_act": "gelu_pytorch_tanh",
        }

    def _deepstack_layers(self) -> list[int]:
        fields = self.fields()
        stored, depth = fields.values.get("is_deepstack_layers"), fields.integer("block_count", 1, 1024)
        if stored is None:
            return []
        if not isinstance(stored, StoredArray) or stored.count != depth:
            fields.fail(
                f"{fields.prefix}is_deepstack_layers is {stored!r:.60}; {depth} truth values are required"
            )
        return [layer for layer, is_one in enumerate(stored.as_flags()) if is_one]
