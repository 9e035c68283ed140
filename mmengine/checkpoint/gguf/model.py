"""Presents a GGUF file as the equivalent model folder: config, tokenizer files and tensors."""

from collections.abc import Callable
from pathlib import Path

from mmengine.checkpoint.gguf.config import generation_config, model_config, paired_heads
from mmengine.checkpoint.gguf.container import Container, open_container
from mmengine.checkpoint.gguf.tensors import GGUFEntry, tensor_entries
from mmengine.checkpoint.gguf.tokenizer import tokenizer_config, tokenizer_json

FILES: dict[str, Callable[[Container], dict[str, object]]] = {
    "config.json": model_config,
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


class GGUFModel:
    """A text model in a GGUF file. The constructor reads only the metadata. Raises ModelError."""

    def __init__(self, path: Path) -> None:
        self.container = open_container(path)

    def file(self, name: str) -> dict[str, object]:
        """Return what the file called `name` contains in an equivalent model folder.

        `name`: config.json, generation_config.json, tokenizer.json, or tokenizer_config.json, which contains
        the chat template. Raises ModelError if the metadata is missing, damaged or not supported.
        """
        return FILES[name](self.container)

    def tensors(self, canonical_name: Callable[[str], str | None]) -> dict[str, GGUFEntry]:
        """Return every tensor by its canonical name, as `open_tensors` does for a folder.

        `canonical_name` receives the transformers names of the tensors. Raises ModelError.
        """
        return tensor_entries(self.container, canonical_name, paired_heads(self.container))
