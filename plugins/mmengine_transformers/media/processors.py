"""Opens transformers' processor for a model folder, and computes the processor's digest. Uses only classes in
the installed transformers and files in the folder. Slow to import, because transformers loads torch.
"""

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # A processor must not look for files outside the folder.
import transformers  # noqa: E402 - reads the variable when it is imported

from mmengine.checkpoint.model_files import has_model_file, is_gguf, read_model_json  # noqa: E402
from mmengine.errors import ModelError, in_one_line  # noqa: E402
from mmengine_transformers.config_values import check_processor_values  # noqa: E402
from mmengine_transformers.torchvision import import_reason  # noqa: E402

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OPENING = threading.Lock()
_video_refusals: dict[Path, str] = {}  # Model folder -> why the model cannot encode videos.


def refuse_videos(folder: Path, reason: str) -> None:
    """Record why the model in `folder` cannot encode videos. This process's processor then refuses videos,
    but still accepts images.
    """
    _video_refusals[folder.resolve()] = reason


def video_refusal(folder: Path) -> str:
    """Return why the model in `folder` cannot encode videos, or "" if no load has found a reason."""
    return _video_refusals.get(folder.resolve(), "")


@lru_cache(maxsize=4)
def open_processor(folder: Path) -> Any:
    """Return transformers' processor for the media that the model in `folder` takes.

    Raises ModelError for a folder with its own code, for a processor that needs a missing package, and for a
    processor that transformers cannot build.
    """
    names = [name for name in (*_FILES, "tokenizer_config.json") if has_model_file(folder, name)]
    files = {name: read_model_json(folder, name) for name in names}
    for name in filter(files.get, _FILES):
        check_processor_values(folder / name, files[name])
    for name, values in files.items():
        if values.get("auto_map"):
            known = values.get("processor_class")
            if not isinstance(known, str) or not hasattr(transformers, known):
                raise ModelError(
                    f"{folder / name} names code in the folder (auto_map), which is never run; transformers "
                    f"{transformers.__version__} has no processor class of its own for it"
                )
    if files.keys().isdisjoint(_FILES):
        raise ModelError(f"{folder} has none of {', '.join(_FILES)}, which a model with images needs")
    try:
        with _OPENING, _processor_folder(folder) as where:
            found = transformers.AutoProcessor.from_pretrained(
                where, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # Processors may raise any exception if something is missing.
        raise ModelError(f"{folder}: {_reason(error)}") from error
    if not isinstance(found, transformers.ProcessorMixin):
        raise ModelError(
            f"{folder}: transformers {transformers.__version__} finds no processor for images, only a "
            f"{type(found).__name__}; the processor_class in the folder's files may be unknown to it"
        )
    return found


@contextmanager
def _processor_folder(model: Path) -> Iterator[Path]:
    """Yield a folder with the tokenizer and the processor settings. For a GGUF model: a temporary folder."""
    if not is_gguf(model):
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        for name in ("tokenizer.json", "tokenizer_config.json", *_FILES):
            if has_model_file(model, name):
                content = read_model_json(model, name)
                if name == "tokenizer_config.json":
                    content = {"tokenizer_class": "PreTrainedTokenizerFast", **content}
                Path(made, name).write_text(json.dumps(content), encoding="utf-8")
        yield Path(made)


def _reason(error: Exception) -> str:
    text = in_one_line(error)
    if isinstance(error, ImportError) or "VIDEO_PROCESSOR_MAPPING" in text:
        return import_reason("the model's processor", error)
    return f"transformers cannot build the model's processor: {text}"


def identity(processor: Any) -> str:
    """Return a digest of everything that determines a processor's output: its class, its settings, and the
    versions of the packages that compute pixels.
    """
    parts = [type(processor).__name__]
    for name in ("image_processor", "video_processor"):
        inner = getattr(processor, name, None)
        parts += [] if inner is None else [type(inner).__name__, inner.to_json_string()]
    for package in ("transformers", "pillow", "torchvision", "torch"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
