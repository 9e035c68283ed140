"""Reads a model's files from a folder, or the equivalent data from a GGUF file."""

from collections.abc import Callable, Mapping
from pathlib import Path

from mmengine.checkpoint.files import read_json
from mmengine.checkpoint.gguf.model import GGUFModel, has_file, model_parts
from mmengine.checkpoint.gguf.pair import gguf_file, is_gguf
from mmengine.checkpoint.quantisation import STORED_BYTES, with_quantised
from mmengine.checkpoint.tensors import TensorEntry, open_tensors, weight_files


def has_model_file(model: Path, name: str) -> bool:
    """Return whether a model has the file `name`, such as config.json. For a GGUF file, return whether
    `read_model_json` can build the file.
    """
    return has_file(model, name) if is_gguf(model) else (model / name).is_file()


def model_file(model: Path, name: str) -> Path:
    """Return the path for error messages: the folder's file, or the GGUF file with the same data."""
    return gguf_file(model) if is_gguf(model) else model / name


def read_model_json(model: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file of the model. Raises ModelError if the file is missing or damaged."""
    return GGUFModel(model).file(name) if is_gguf(model) else read_json(model / name)


def model_tensors(model: Path, canonical_name: Callable[[str], str | None]) -> Mapping[str, TensorEntry]:
    """Return every tensor of a model by its canonical name. Raises ModelError as `open_tensors` and
    `with_quantised` do.
    """
    if is_gguf(model):
        return GGUFModel(model).tensors(canonical_name)
    return with_quantised(model, open_tensors(model, canonical_name, STORED_BYTES))


def model_weight_files(model: Path) -> list[Path]:
    """Return the files that contain a model's weights. Raises ModelError if a file is missing."""
    return model_parts(model) if is_gguf(model) else weight_files(model)


def model_note(model: Path) -> str:
    """Return a text for users about a GGUF model's projector, or "" if there is nothing to report. Raises
    ModelError.
    """
    return GGUFModel(model).note if is_gguf(model) else ""


def lacks_projector(model: Path) -> bool:
    """Return whether the model is a GGUF file that would take images if it had a projector."""
    return is_gguf(model) and GGUFModel(model).lacks_projector
