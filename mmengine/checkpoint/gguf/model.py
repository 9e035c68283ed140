"""Presents a GGUF file as the equivalent model folder: config, tokenizer and processor files, and tensors."""

from collections.abc import Callable
from pathlib import Path

from mmengine.checkpoint.gguf.config import (
    generation_config,
    model_config,
    paired_heads,
    projectors_of,
    vision_model_config,
)
from mmengine.checkpoint.gguf.pair import gguf_file, parts_of_pair, projector_file
from mmengine.checkpoint.gguf.projector import Projector, open_projector
from mmengine.checkpoint.gguf.split import open_parts, part_files
from mmengine.checkpoint.gguf.tensors import GGUFEntry, tensor_entries
from mmengine.checkpoint.gguf.tokenizer import tokenizer_config, tokenizer_json
from mmengine.errors import ModelError

CONFIG, IMAGES, VIDEOS = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"
TEXT_FILES = {
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


class GGUFModel:
    """A model in a GGUF file, with its projector if it has one. The constructor reads only the metadata.

    `path`: a file, or a name made by `pair`. Raises ModelError.
    """

    def __init__(self, path: Path) -> None:
        self.container = open_parts(gguf_file(path))
        self.projector = self._open_projector(path)

    def _open_projector(self, path: Path) -> Projector | None:
        # An unknown architecture is reported when the config is read.
        kinds = projectors_of(self.container)
        file = projector_file(path)
        if file is None or not kinds and parts_of_pair(path)[1] is None:
            return None
        if not kinds:
            own = self.container.metadata.get("general.architecture")
            raise ModelError(
                f"{gguf_file(path)}: {own!r:.60} is a text model; it takes no projector ({file})"
            )
        return open_projector(file, kinds, self._hidden_size(), self.container)

    def _hidden_size(self) -> int:
        key = f"{self.container.metadata['general.architecture']}.embedding_length"
        return self.container.fields.integer(key, 1, 2**17)

    def file(self, name: str) -> dict[str, object]:
        """Return what the file called `name` contains in an equivalent model folder.

        `name`: config.json, generation_config.json, tokenizer.json, or tokenizer_config.json, which contains
        the chat template; with a projector, also preprocessor_config.json and video_preprocessor_config.json.
        Raises ModelError if the metadata is missing, damaged or not supported.
        """
        projector = self.projector
        if name == CONFIG:
            found = model_config(self.container)
            return found if projector is None else vision_model_config(found, self.container, projector)
        if projector is not None and name in (IMAGES, VIDEOS):
            return projector.image_settings() if name == IMAGES else projector.video_settings()
        return TEXT_FILES[name](self.container)

    def tensors(self, canonical_name: Callable[[str], str | None]) -> dict[str, GGUFEntry]:
        """Return every tensor by its canonical name, as `open_tensors` does for a folder.

        `canonical_name` receives the transformers names of the tensors. Raises ModelError.
        """
        entries = tensor_entries(self.container, canonical_name, paired_heads(self.container))
        for name, entry in (self.projector.tensors() if self.projector else {}).items():
            canonical = canonical_name(name) or name
            if canonical in entries:
                raise ModelError(f"{entry.path}: {entry.stored_name} is in {entries[canonical].path} too")
            entries[canonical] = entry
        return entries

    @property
    def lacks_projector(self) -> bool:
        """Return whether the architecture takes images, but no projector is there."""
        return self.projector is None and bool(projectors_of(self.container))


def has_file(path: Path, name: str) -> bool:
    """Return whether `GGUFModel(path).file` can build the file `name`. Raises ModelError."""
    if name in (IMAGES, VIDEOS):
        return GGUFModel(path).projector is not None
    return name == CONFIG or name in TEXT_FILES


def model_parts(path: Path) -> list[Path]:
    """Return the files with the weights: all parts of the model, and its projector."""
    files, projector = part_files(gguf_file(path)), GGUFModel(path).projector
    return files if projector is None else [*files, projector.path]


def projector_note(path: Path) -> str:
    """Return a text for users that names the projector and the pixel limits, or "" for a text model."""
    model = GGUFModel(path)
    if model.projector is not None:
        return model.projector.limits_text()
    return "text only, because no projector is beside the model (--mmproj)" if model.lacks_projector else ""
