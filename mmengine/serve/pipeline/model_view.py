"""Provides the attributes `model`, `processor` and `tokenizer` of a transformers pipeline."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

from mmengine.checkpoint.model_files import is_gguf, read_model_json
from mmengine.serve.engine.engine import Engine


@dataclass(frozen=True)
class ModelView:
    """Read-only facts about a pipeline's model. To generate text, call the pipeline.

    `name_or_path` is the folder or the GGUF file. `device` and `dtype` are torch objects.
    """

    name_or_path: str
    device: object
    dtype: object

    @cached_property
    def config(self) -> object:
        """The model's config as transformers' object.

        Without transformers, and for a GGUF file, the result is a substitute object with the same attributes.
        """
        folder = Path(self.name_or_path)
        found = _from_transformers("AutoConfig", folder)
        return _as_object(read_model_json(folder, "config.json")) if found is None else found


def model_view(engine: Engine) -> ModelView:
    """Return a ModelView of the engine's model."""
    import torch  # lazy: if the engine uses torch, torch is already loaded

    built = engine.built
    return ModelView(str(built.folder), torch.device(built.device), getattr(torch, built.dtype))


def processor_of(engine: Engine) -> object:
    """Return transformers' processor for the model.

    For a GGUF file, or if transformers or another required package is missing, return the engine's
    processor.
    """
    found = _from_transformers("AutoProcessor", engine.built.folder)
    return engine.processor if found is None else found


def tokenizer_of(engine: Engine) -> object:
    """Return transformers' tokenizer for the model.

    For a GGUF file, or if transformers or another required package is missing, return the engine's
    tokenizer.
    """
    found = _from_transformers("AutoTokenizer", engine.built.folder)
    return engine.processor.tokenizer if found is None else found


def _from_transformers(loader: str, folder: Path) -> object:
    """Return the object that the transformers class `loader` loads from the folder, or None.

    Returns None for a GGUF file, because transformers' token ids differ from the engine's ids. Also returns
    None if transformers or another required package is not installed.
    """
    if is_gguf(folder):
        return None
    try:
        import transformers  # lazy, because transformers is optional

        return getattr(transformers, loader).from_pretrained(folder)
    except ImportError:
        return None


def _as_object(value: object) -> object:
    if isinstance(value, dict):
        return SimpleNamespace(**{str(name): _as_object(each) for name, each in value.items()})
    return [_as_object(each) for each in value] if isinstance(value, list) else value
