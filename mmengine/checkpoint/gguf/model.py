"""Presents a GGUF file as the equivalent model folder: config, tokenizer and processor files, and tensors."""

from collections.abc import Callable
from pathlib import Path

from mmengine.checkpoint.gguf.config import (
    architecture_of,
    generation_config,
    known_architecture,
    model_config,
    paired_heads,
    text_fields,
)
from mmengine.checkpoint.gguf.gemma3 import PARTS as GEMMA_PARTS
from mmengine.checkpoint.gguf.gemma3 import gemma_entry
from mmengine.checkpoint.gguf.pair import gguf_file, parts_of_pair, projector_file
from mmengine.checkpoint.gguf.projector import Projector
from mmengine.checkpoint.gguf.projectors import open_projector
from mmengine.checkpoint.gguf.qwen35 import hybrid_entry, hybrid_name, num_trunk_layers
from mmengine.checkpoint.gguf.split import open_parts, part_files
from mmengine.checkpoint.gguf.tensors import PARTS, GGUFEntry, tensor_entries
from mmengine.checkpoint.gguf.tokenizer import tokenizer_config, tokenizer_json
from mmengine.errors import ModelError

CONFIG = "config.json"
MEDIA_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TEXT_FILES = {
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


class GGUFModel:
    """A model in a GGUF file, with its projector if it has one. The constructor reads only the metadata.

    `path`: a GGUF file, or a name that gguf/pair.py makes from a model and a projector. Raises ModelError.
    """

    def __init__(self, path: Path) -> None:
        self.container = open_parts(gguf_file(path))
        self._unused = ""  # Why the projector beside the model is not used.
        self.projector = self._open_projector(path)

    def _open_projector(self, path: Path) -> Projector | None:
        found, file = known_architecture(self.container), projector_file(path)
        kinds, is_named = found.projectors if found else (), parts_of_pair(path)[1] is not None
        if file is None or (not kinds and not is_named):
            return None
        if not kinds:
            own = self.container.metadata.get("general.architecture")
            raise ModelError(
                f"{gguf_file(path)}: {own!r:.60} is a text model; it takes no projector ({file})"
            )
        try:
            return open_projector(file, kinds, self._hidden_size(), self.container)
        except ModelError as error:
            if is_named or (found and found.is_vision):
                raise
            # The projector in the same folder may belong to another model.
            self._unused = str(error)
            return None

    def _hidden_size(self) -> int:
        key = f"{self.container.metadata['general.architecture']}.embedding_length"
        return self.container.fields.integer(key, 1, 2**17)

    def file(self, name: str) -> dict[str, object]:
        """Return the contents of the file `name` in an equivalent model folder.

        `name`: config.json, generation_config.json, tokenizer.json or tokenizer_config.json; with a
        projector, also the names in `projector.settings()`. Raises ModelError if the metadata is missing,
        damaged or not supported.
        """
        projector = self.projector
        if name == CONFIG:
            found = model_config(self.container)
            return found if projector is None else projector.model_config(found, self.container)
        if projector is not None and name in MEDIA_FILES:
            return projector.settings()[name]
        extra = projector.tokenizer_settings() if projector and name == "tokenizer_config.json" else {}
        return TEXT_FILES[name](self.container) | extra

    def tensors(self, canonical_name: Callable[[str], str | None]) -> dict[str, GGUFEntry]:
        """Return a dict from each tensor's canonical name to its entry.

        `canonical_name`: maps a tensor's name in transformers to the canonical name, or to None to skip the
        tensor. Raises ModelError.
        """
        projector = self.projector
        entries = self._text_tensors(canonical_name)
        if projector is None:
            return entries
        for name, entry in projector.tensors().items():
            canonical = canonical_name(name)
            if canonical is None:
                continue
            if canonical in entries:
                raise ModelError(f"{entry.path}: {entry.stored_name} is in {entries[canonical].path} too")
            entries[canonical] = entry
        return entries

    def _text_tensors(self, canonical_name: Callable[[str], str | None]) -> dict[str, GGUFEntry]:
        """Return the model's tensors, without the projector's."""
        projector, found = self.projector, architecture_of(self.container)
        is_hybrid = found.is_hybrid
        num_layers = num_trunk_layers(text_fields(self.container)) if is_hybrid else 0

        def text_name(name: str) -> str | None:
            if is_hybrid:
                name = hybrid_name(name, num_layers)
            return canonical_name(name if projector is None else projector.text_name(name))

        parts = PARTS | GEMMA_PARTS if found.is_gemma else PARTS
        entries = tensor_entries(self.container, text_name, paired_heads(self.container), parts)
        if found.is_gemma:
            return {name: gemma_entry(each) for name, each in entries.items()}
        return {name: hybrid_entry(each) for name, each in entries.items()} if is_hybrid else entries

    @property
    def note(self) -> str:
        """Return a text for users about the projector or its absence, or "" for a text model."""
        if self.projector is not None:
            return self.projector.limits_text()
        if self._unused:
            return f"text only, because the projector beside the model does not fit ({self._unused})"
        return (
            "text only, because no projector is beside the model (--mmproj)" if self.lacks_projector else ""
        )

    @property
    def lacks_projector(self) -> bool:
        """Return whether the architecture takes images, but the model has no projector."""
        found = known_architecture(self.container)
        return self.projector is None and found is not None and found.is_vision


def has_file(path: Path, name: str) -> bool:
    """Return whether `GGUFModel(path).file` can build the file `name`. Raises ModelError."""
    if name in MEDIA_FILES:
        projector = GGUFModel(path).projector
        return projector is not None and name in projector.settings()
    return name == CONFIG or name in TEXT_FILES


def model_parts(path: Path) -> list[Path]:
    """Return the files with the weights: all parts of the model, and its projector."""
    files, projector = part_files(gguf_file(path)), GGUFModel(path).projector
    return files if projector is None else [*files, projector.path]
