"""Reads a GGUF file with a vision projector: the vision tower and its merger, llama.cpp's "mmproj".

A projector file does not name its text model, so only the sizes can show whether two files belong together.
Subclasses add the image processor settings that the file lacks.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mmengine.checkpoint.fields import Fields
from mmengine.checkpoint.gguf.container import Container, StoredArray
from mmengine.checkpoint.gguf.frames import patch_entry
from mmengine.checkpoint.gguf.tensors import GGUFEntry, tensor_entry

PATCHES, POSITIONS = "v.patch_embd.weight", "v.position_embd.weight"
MAX_SIZE = 2**17  # Maximum number of values in a patch or an embedding.
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_STORED = re.compile(r"(?:v\.blk\.(\d+)\.(\w+)|([\w.]+))\.(weight|bias)")
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Projector(ABC):
    """A projector file. Each model family has a subclass.

    `kind`: the projector type in GGUF files. `layers`: transformers' name for the list of layers. `parts`:
    GGUF name -> transformers name in a layer, without .weight or .bias. `places`: the same map for tensors
    outside the layers.
    """

    kind: ClassVar[str]
    layers: ClassVar[str]
    parts: ClassVar[Mapping[str, str]]
    places: ClassVar[Mapping[str, str]]
    container: Container

    @abstractmethod
    def model_config(self, text: Json, container: Container) -> Json:
        """Return config.json for the vision-language model. `text`: the text model's config.json.
        `container`: the text model's file. Raises ModelError.
        """

    @abstractmethod
    def settings(self) -> dict[str, Json]:
        """Return the processor's files by name. Raises ModelError."""

    @abstractmethod
    def limits_text(self) -> str:
        """Return the projector's name and the settings that the subclass adds, as text for messages."""

    def name_of(self, stored: str) -> str:
        """Return the transformers name for a projector's tensor. An unknown name stays unchanged."""
        if (found := _STORED.fullmatch(stored)) is None:
            return stored
        layer, part, place, ending = found.groups()
        if layer is None:
            name = self.places.get(place)
        elif (name := self.parts.get(self.part_of_layer(part))) is not None:
            name = f"{self.layers}.{layer}.{name}"
        return stored if name is None else f"{name}.{ending}"

    def text_name(self, name: str) -> str:
        """Return the vision-language model's name for the text model's tensor `name`."""
        return name

    @property
    def path(self) -> Path:
        return self.container.path

    @property
    def out_hidden_size(self) -> int:
        return self.fields().integer("projection_dim", 1, MAX_SIZE)

    def tensors(self) -> dict[str, GGUFEntry]:
        """Return every tensor by its transformers name. Raises ModelError."""
        found = {}
        for tensor in self.container.tensors.values():
            if tensor.name == PATCHES:
                found[self.name_of(tensor.name)] = patch_entry(self.container, PATCHES)
            elif tensor.name != f"{PATCHES}.1":
                found[self.name_of(tensor.name)] = tensor_entry(tensor)
        return found

    def fields(self) -> Fields:
        """Return the metadata for images. Keys are without the prefix "clip.vision."."""
        prefix, own = "clip.vision.", self.container.metadata
        values = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        return Fields(values, self.path, prefix)

    def tokenizer_settings(self) -> Json:
        """Return fields of tokenizer_config.json that the family's processor needs."""
        return {}

    def check_tensors(self, *names: str) -> None:
        """Raise ModelError if a tensor in `names` (default: the patch and position embeddings) is missing."""
        for name in names or (PATCHES, POSITIONS):
            if name not in self.container.tensors:
                self.container.fields.fail(f"tensor {name} is missing; download the projector again")

    def normalisation(self) -> Json:
        fields = self.fields()
        found: Json = {}
        for name in ("image_mean", "image_std"):
            if isinstance(stored := fields.values.get(name), StoredArray) and stored.count == 3:
                found[name] = stored.as_numbers()
            else:
                fields.fail(f"{fields.prefix}{name} is {stored!r:.60}; it must be three numbers")
        return found

    def part_of_layer(self, part: str) -> str:
        """Return `part`, the GGUF name of a tensor in a layer, corrected for old files: old converters
        swapped ffn_up and ffn_down.
        """
        return _SWAPPED.get(part, part) if self._swaps() else part

    def intermediate_size(self, hidden: int) -> int:
        """Return the MLP's intermediate size from the metadata. If the metadata has 0, as in old files, the
        size comes from an MLP matrix's shape.
        """
        size = self.fields().integer("feed_forward_length", 0, MAX_SIZE, 0)
        shape = self.container.tensors.get("v.blk.0.ffn_up.weight")
        if size or shape is None:
            return size
        return max(shape.shape) if hidden in shape.shape else shape.shape[0]

    def _swaps(self) -> bool:
        first = self.container.tensors.get("v.blk.0.ffn_down.weight")
        hidden = self.fields().integer("embedding_length", 1, MAX_SIZE)
        return first is not None and first.shape[-1] == hidden and first.shape[0] != hidden
