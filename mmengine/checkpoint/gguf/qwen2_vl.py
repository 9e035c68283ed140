"""Reads the projector of a Qwen2-VL or Qwen2.5-VL model."""

import re
from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.config import QWEN2_5_VL, QWEN2_VL
from mmengine.checkpoint.gguf.container import Container
from mmengine.checkpoint.gguf.joined import joined_entry
from mmengine.checkpoint.gguf.projector import MAX_SIZE, Json
from mmengine.checkpoint.gguf.qwen_vl import QwenProjector, media_text_config, media_token_ids
from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.gguf.tokenizer import token_id

WINDOW_SIZE, TOKENS_PER_SECOND = 112, 2  # Constants of Qwen2.5-VL's config.json.
_PATTERN = "n_wa_pattern"  # If the value is n, layers n - 1, 2n - 1, ... have full attention.
_MATRIX = "v.blk.0.ffn_up.weight"
_PARTS = {  # GGUF name -> transformers name in a layer, without the MLP, which differs between the families.
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
}
_QUERY = re.compile(r"visual\.blocks\.\d+\.attn\.q\.(?:weight|bias)")


@dataclass(frozen=True, slots=True)
class Qwen2VLProjector(QwenProjector):
    """A projector for Qwen2-VL."""

    kind = QWEN2_VL
    layers = "visual.blocks"
    parts: ClassVar[dict[str, str]] = _PARTS | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    places: ClassVar[dict[str, str]] = {
        "v.patch_embd": "visual.patch_embed.proj",
        "v.post_ln": "visual.merger.ln_q",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    }
    title = "Qwen2-VL"
    images: ClassVar[dict[str, int]] = {"shortest_edge": 3136, "longest_edge": 12845056}
    model: ClassVar[str] = "Qwen2VL"
    model_type: ClassVar[str] = "qwen2_vl"

    def model_config(self, text: Json, container: Container) -> Json:
        return {
            "architectures": [f"{self.model}ForConditionalGeneration"],
            "model_type": self.model_type,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": media_text_config(text, container, self.model_type),
            "vision_config": self._vision_config() | {"model_type": f"{self.model_type}_vision"},
            **media_token_ids(container),
            **{
                f"vision_{end}_token_id": token_id(container, f"<|vision_{end}|>") for end in ("start", "end")
            },
        }

    def settings(self) -> dict[str, Json]:
        tower = self.tower_config()
        common = {
            **self.normalisation(),
            "patch_size": tower["patch_size"],
            "temporal_patch_size": tower["temporal_patch_size"],
            "merge_size": tower["spatial_merge_size"],
            "size": dict(self.images),
            "processor_class": f"{self.model}Processor",
        }
        return {
            "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
            "video_preprocessor_config.json": {**common, "video_processor_type": "Qwen2VLVideoProcessor"},
        }

    def tensors(self) -> dict[str, GGUFEntry]:
        """Return every tensor by its transformers name, with queries, keys and values joined."""
        found = QwenProjector.tensors(self)
        for query in [name for name in found if _QUERY.fullmatch(name)]:
            names = [query.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
            if all(name in found for name in names):
                joined = joined_entry(*(found.pop(name) for name in names))
                found[query.replace(".attn.q.", ".attn.qkv.")] = joined
        return found

    def _vision_config(self) -> Json:
        tower = self.tower_config()
        hidden = self.fields().integer("embedding_length", 1, MAX_SIZE)
        # The converter wrongly writes the text model's hidden size as the MLP size. Only the matrix has the
        # true size.
        self.check_tensors(_MATRIX)
        size = max(self.container.tensors[_MATRIX].shape)
        if size % hidden:
            self.fields().fail(f"{_MATRIX} has {size} rows, not a multiple of the hidden size {hidden}")
        return tower | {
            "embed_dim": hidden,
            "hidden_size": self.out_hidden_size,
            "mlp_ratio": size // hidden,
            "hidden_act": "quick_gelu",
        }


@dataclass(frozen=True, slots=True)
class Qwen25VLProjector(Qwen2VLProjector):
    """A projector for Qwen2.5-VL, whose tower has windows in most layers and a gated MLP."""

    kind = QWEN2_5_VL
    title = "Qwen2.5-VL"
    model = "Qwen2_5_VL"
    model_type = "qwen2_5_vl"
    parts: ClassVar[dict[str, str]] = _PARTS | {
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    def _vision_config(self) -> Json:
        tower, fields = self.tower_config(), self.fields()
        hidden = fields.integer("embedding_length", 1, MAX_SIZE)
        depth = fields.integer("block_count", 1, 1024)
        every = fields.integer(_PATTERN, 0, 1024, 0)
        return tower | {
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size(hidden),
            "out_hidden_size": self.out_hidden_size,
            "fullatt_block_indexes": list(range(every - 1, depth, every)) if every else list(range(depth)),
            "window_size": WINDOW_SIZE,
            "tokens_per_second": TOKENS_PER_SECOND,
            "hidden_act": "silu",
        }
