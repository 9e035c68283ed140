"""Reads the projector of a Qwen2-VL or Qwen2.5-VL model. transformers' modules serve both families."""

import re
from dataclasses import dataclass
from typing import ClassVar

from mmengine.checkpoint.gguf.config import QWEN2_5_VL, QWEN2_VL, SECTIONS, text_fields
from mmengine.checkpoint.gguf.container import Container, StoredArray
from mmengine.checkpoint.gguf.joined import joined_entry
from mmengine.checkpoint.gguf.projector import MAX_SIZE, PATCHES, Json, Projector
from mmengine.checkpoint.gguf.tensors import GGUFEntry
from mmengine.checkpoint.gguf.tokenizer import token_id

# The limits in pixels from the families' processor files at the hub. GGUF projector files contain no limits.
IMAGES = {"shortest_edge": 3136, "longest_edge": 12845056}
WINDOW_SIZE, TOKENS_PER_SECOND = 112, 2  # Constants of Qwen2.5-VL's config.json.
_PATTERN = "n_wa_pattern"  # The first layer without windows is the one before this number.
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
class Qwen2VLProjector(Projector):
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
    title: ClassVar[str] = "Qwen2-VL"
    model: ClassVar[str] = "Qwen2VL"
    model_type: ClassVar[str] = "qwen2_vl"

    def model_config(self, text: Json, container: Container) -> Json:
        fields = text_fields(container)
        sections = fields.values.get(SECTIONS)
        if not isinstance(sections, StoredArray) or sections.count not in (3, 4):
            fields.fail(f"{fields.prefix}{SECTIONS} is {sections!r:.60}; three numbers are required")
        rope = text["rope_parameters"]
        assert isinstance(rope, dict)
        rope = rope | {"mrope_section": sections.as_integers()[:3].tolist()}
        vision = self._vision_config()
        return {
            "architectures": [f"{self.model}ForConditionalGeneration"],
            "model_type": self.model_type,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "text_config": text | {"rope_parameters": rope, "model_type": f"{self.model_type}_text"},
            "vision_config": vision | {"model_type": f"{self.model_type}_vision"},
            **{f"{name}_token_id": token_id(container, f"<|{name}_pad|>") for name in ("image", "video")},
            **{
                f"vision_{end}_token_id": token_id(container, f"<|vision_{end}|>") for end in ("start", "end")
            },
        }

    def settings(self) -> dict[str, Json]:
        fields, tensors = self.fields(), self.container.tensors
        common = {
            **self.normalisation(),
            "patch_size": fields.integer("patch_size", 1, 256),
            "temporal_patch_size": 2 if f"{PATCHES}.1" in tensors else 1,
            "merge_size": fields.integer("spatial_merge_size", 1, 16, 2),
            "size": dict(IMAGES),
            "processor_class": f"{self.model}Processor",
        }
        return {
            "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
            "video_preprocessor_config.json": {**common, "video_processor_type": "Qwen2VLVideoProcessor"},
        }

    def limits_text(self) -> str:
        low, high = IMAGES.values()
        return (
            f"projector {self.path.name} with the pixel limits of {self.title}'s processor ({low:,} to "
            f"{high:,})"
        )

    def tensors(self) -> dict[str, GGUFEntry]:
        """Return every tensor by its transformers name, with queries, keys and values joined."""
        found = Projector.tensors(self)
        for query in [name for name in found if _QUERY.fullmatch(name)]:
            names = [query.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
            if all(name in found for name in names):
                joined = joined_entry(*(found.pop(name) for name in names))
                found[query.replace(".attn.q.", ".attn.qkv.")] = joined
        return found

    def _vision_config(self) -> Json:
        sizes = self._sizes()
        hidden = self.fields().integer("embedding_length", 1, MAX_SIZE)
        # The converter writes the text model's hidden size as the MLP's size, so the matrix decides.
        self.check_tensors(_MATRIX)
        size = max(self.container.tensors[_MATRIX].shape)
        if size % hidden:
            self.fields().fail(f"{_MATRIX} has {size} rows, not a multiple of the hidden size {hidden}")
        return sizes | {
            "embed_dim": hidden,
            "hidden_size": self.out_hidden_size,
            "mlp_ratio": size // hidden,
            "hidden_act": "quick_gelu",
        }

    def _sizes(self) -> Json:
        """Return the vision config's fields that both families have."""
        self.check_tensors(PATCHES)
        fields, patches = self.fields(), self.container.tensors[PATCHES]
        eps = fields.number("attention.layer_norm_epsilon", 1e-6)
        if not 0.99e-6 < eps < 1.01e-6:
            fields.fail(f"{fields.prefix}attention.layer_norm_epsilon is {eps:g}; {self.title} has 1e-06")
        return {
            "depth": fields.integer("block_count", 1, 1024),
            "num_heads": fields.integer("attention.head_count", 1, 1024),
            "in_channels": patches.shape[1] if len(patches.shape) == 4 else 3,
            "patch_size": fields.integer("patch_size", 1, 256),
            "temporal_patch_size": 2 if f"{PATCHES}.1" in self.container.tensors else 1,
            "spatial_merge_size": fields.integer("spatial_merge_size", 1, 16, 2),
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
        sizes, fields = self._sizes(), self.fields()
        hidden = fields.integer("embedding_length", 1, MAX_SIZE)
        depth = fields.integer("block_count", 1, 1024)
        every = fields.integer(_PATTERN, 0, 1024, 0)
        return sizes | {
            "hidden_size": hidden,
            "intermediate_size": self.intermediate_size(hidden),
            "out_hidden_size": self.out_hidden_size,
            "fullatt_block_indexes": list(range(every - 1, depth, every)) if every else list(range(depth)),
            "window_size": WINDOW_SIZE,
            "tokens_per_second": TOKENS_PER_SECOND,
            "hidden_act": "silu",
        }
