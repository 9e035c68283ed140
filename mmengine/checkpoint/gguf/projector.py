"""Reads a GGUF file with a vision projector: the vision tower and its merger, llama.cpp's "mmproj".

A projector says neither which text model it belongs to nor how an image is prepared. So the sizes are
compared with the text model's, and the pixel limits come from the family's processor.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf.container import Container, StoredArray, open_container
from mmengine.checkpoint.gguf.frames import patch_entry
from mmengine.checkpoint.gguf.tensors import GGUFEntry, tensor_entry
from mmengine.errors import ModelError

ARCHITECTURE, PATCHES, POSITIONS = "clip", "v.patch_embd.weight", "v.position_embd.weight"
_MAX = 2**17  # Maximum of every size.
# Qwen3-VL's processor files at its hub. A projector file has no such limits.
QWEN3_VL_IMAGES = {"shortest_edge": 65536, "longest_edge": 16777216}
QWEN3_VL_VIDEOS = {"shortest_edge": 4096, "longest_edge": 25165824}
_PLACES = {  # GGUF name -> transformers name, without "model.visual." and without weight or bias.
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
_PARTS = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_STORED = re.compile(
    r"(?:v\.blk\.(?P<layer>\d+)\.(?P<part>\w+)|v\.deepstack\.(?P<deep>\d+)\.(?P<step>\w+)|(?P<place>[\w.]+))"
    r"\.(?P<kind>weight|bias)"
)


@dataclass(frozen=True, slots=True)
class Projector:
    """An opened projector file for a Qwen3-VL model."""

    container: Container

    @property
    def path(self) -> Path:
        return self.container.path

    def vision_config(self) -> dict[str, object]:
        """Return `vision_config` of config.json. Raises ModelError for a size that is missing or wrong."""
        fields, tensors = self._fields(), self.container.tensors
        for name in (PATCHES, POSITIONS):
            if name not in tensors:
                fields.fail(f"tensor {name} is missing; download the projector again")
        eps = fields.number("attention.layer_norm_epsilon", 1e-6)
        if not 0.99e-6 < eps < 1.01e-6:
            fields.fail(f"{fields.prefix}attention.layer_norm_epsilon is {eps:g}; Qwen3-VL has 1e-06")
        hidden = fields.integer("embedding_length", 1, _MAX)
        return {
            "model_type": "qwen3_vl",
            "depth": fields.integer("block_count", 1, 1024),
            "hidden_size": hidden,
            "intermediate_size": self._intermediate_size(fields, hidden),
            "num_heads": fields.integer("attention.head_count", 1, 1024),
            "out_hidden_size": self.out_hidden_size,
            "in_channels": tensors[PATCHES].shape[1] if len(tensors[PATCHES].shape) == 4 else 3,
            "patch_size": fields.integer("patch_size", 1, 256),
            "temporal_patch_size": 2 if f"{PATCHES}.1" in tensors else 1,
            "spatial_merge_size": fields.integer("spatial_merge_size", 1, 16, 2),
            "num_position_embeddings": tensors[POSITIONS].shape[0],
            "deepstack_visual_indexes": self._deepstack_layers(),
            "hidden_act": "gelu_pytorch_tanh",
        }

    @property
    def out_hidden_size(self) -> int:
        return self._fields().integer("projection_dim", 1, _MAX)

    def image_settings(self) -> dict[str, object]:
        """Return preprocessor_config.json, with the family's pixel limits."""
        return {**self._normalisation(), "size": dict(QWEN3_VL_IMAGES)}

    def video_settings(self) -> dict[str, object]:
        """Return video_preprocessor_config.json, as `image_settings`."""
        return {**self._normalisation(), "size": dict(QWEN3_VL_VIDEOS)}

    def limits_text(self) -> str:
        """Return a text that names the source of the pixel limits."""
        low, high = QWEN3_VL_IMAGES.values()
        return (
            f"projector {self.path.name} with the pixel limits of Qwen3-VL's processor ({low:,} to {high:,})"
        )

    def tensors(self) -> dict[str, GGUFEntry]:
        """Return every tensor by its transformers name. Raises ModelError."""
        layers, swaps, found = self._deepstack_layers(), self._swaps(), {}
        for tensor in self.container.tensors.values():
            if tensor.name != f"{PATCHES}.1":
                name = _plain_name(tensor.name, layers, swaps)
                found[name] = (
                    patch_entry(self.container, PATCHES) if tensor.name == PATCHES else tensor_entry(tensor)
                )
        return found

    def _fields(self) -> Fields:
        prefix, own = "clip.vision.", self.container.metadata
        values = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        return Fields(values, self.path, prefix)

    def _normalisation(self) -> dict[str, object]:
        fields = self._fields()
        found: dict[str, object] = {}
        for name in ("image_mean", "image_std"):
            if isinstance(stored := fields.values.get(name), StoredArray) and stored.count == 3:
                found[name] = stored.as_numbers()
            else:
                fields.fail(f"{fields.prefix}{name} is {stored!r:.60}; it must be three numbers")
        return found

    def _deepstack_layers(self) -> list[int]:
        fields = self._fields()
        stored, depth = fields.values.get("is_deepstack_layers"), fields.integer("block_count", 1, 1024)
        if stored is None:
            return []
        if not isinstance(stored, StoredArray) or stored.count != depth:
            fields.fail(
                f"{fields.prefix}is_deepstack_layers is {stored!r:.60}; {depth} truth values are required"
            )
        return [layer for layer, is_one in enumerate(stored.as_flags()) if is_one]

    def _swaps(self) -> bool:
        """Return whether the file calls the first matrix of an MLP ffn_down, as old converters did."""
        first = self.container.tensors.get("v.blk.0.ffn_down.weight")
        hidden = self._fields().integer("embedding_length", 1, _MAX)
        return first is not None and first.shape[-1] == hidden and first.shape[0] != hidden

    def _intermediate_size(self, fields: Fields, hidden: int) -> int:
        """Return the size from the file, or from a tensor's shape where old files say 0."""
        size = fields.integer("feed_forward_length", 0, _MAX, 0)
        shape = self.container.tensors.get("v.blk.0.ffn_up.weight")
        if size or shape is None:
            return size
        return max(shape.shape) if hidden in shape.shape else shape.shape[0]


def open_projector(path: Path, kinds: tuple[str, ...], hidden_size: int, text: Container) -> Projector:
    """Open the projector for the text model `text`, whose embedding has `hidden_size` values.

    `kinds`: the projector types that fit the text model's architecture. Raises ModelError for a file that is
    missing, damaged, not a projector, or another model's projector.
    """
    if not path.is_file():
        raise ModelError(f"there is no projector {path}; give a GGUF file that is on this machine, or none")
    container = open_container(path)
    values, fields = container.metadata, container.fields
    if (kind := values.get("general.architecture")) != ARCHITECTURE:
        fields.fail(
            f"general.architecture is {kind!r:.60}; a projector's is {ARCHITECTURE}: give another file"
        )
    if values.get("clip.has_vision_encoder") is not True:
        fields.fail("clip.has_vision_encoder is not true; give a projector for images")
    found = values.get("clip.vision.projector_type", values.get("clip.projector_type"))
    if found not in kinds:
        own = values.get("general.architecture"), text.metadata.get("general.architecture")
        fields.fail(
            f"its projector type is {found!r:.60}, but {text.path.name} is {own[1]} and needs "
            f"{' or '.join(kinds)}: it is the projector of another model"
        )
    projector = Projector(container)
    if projector.out_hidden_size != hidden_size:
        fields.fail(
            f"it projects to {projector.out_hidden_size} values, but {text.path.name} has embeddings of "
            f"{hidden_size}: it is the projector of another model"
        )
    return projector


def _plain_name(stored: str, deepstack_layers: list[int], swaps: bool) -> str:
    """Return the transformers name for a projector's tensor. A name that is not known stays unchanged."""
    found = _STORED.fullmatch(stored)
    if found is None:
        return stored
    layer, part, deep, step, place, kind = found.groups()
    if layer is not None:
        part = _SWAPPED.get(part, part) if swaps else part
        name = f"blocks.{layer}.{_PARTS[part]}" if part in _PARTS else None
    elif deep is not None:
        is_known = int(deep[:9]) in deepstack_layers and step in _DEEPSTACK
        name = (
            f"deepstack_merger_list.{deepstack_layers.index(int(deep))}.{_DEEPSTACK[step]}"
            if is_known
            else None
        )
    else:
        name = _PLACES.get(place)
    return stored if name is None else f"model.visual.{name}.{kind}"
