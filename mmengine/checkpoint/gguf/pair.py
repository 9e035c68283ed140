"""Names a GGUF model together with its projector in one path, `MODEL.gguf?mmproj=PROJECTOR.gguf`.

An engine's processes, log and plugins identify a model by one path. Without the suffix `?mmproj=`, the
projector is searched for in the model's folder.
"""

import os
from pathlib import Path

from mmengine.checkpoint.gguf.file_names import SUFFIX, find_projector

MARK = "?mmproj="
NO_PROJECTOR = "none"


def pair(model: str | Path, projector: str | Path | None) -> str:
    """Return one name for a model and its projector. `projector`: a file, "none" for text only, or None for
    the projector beside the model.
    """
    return str(model) if projector is None else f"{model}{MARK}{projector}"


def parts_of_pair(name: str | Path) -> tuple[str, str | None]:
    """Return the model, and the named projector or None."""
    model, mark, projector = str(name).partition(MARK)
    return model, projector if mark else None


def is_gguf(model: Path) -> bool:
    """Return whether `model` is a GGUF file on this machine, with or without a named projector."""
    file = gguf_file(model)
    return file.suffix == SUFFIX and file.is_file()


def gguf_file(model: Path) -> Path:
    """Return the text model's GGUF file: `model` without the suffix `?mmproj=...`."""
    return Path(parts_of_pair(model)[0]) if MARK in str(model) else model


def projector_file(model: Path) -> Path | None:
    """Return the projector that `model` names, or by default the projector in the model's folder. Return None
    if `model` names "none", or if the folder has no projector.
    """
    file, named = gguf_file(model), parts_of_pair(model)[1]
    if named is not None:
        return None if named == NO_PROJECTOR else Path(named)
    try:
        beside = sorted(os.listdir(file.parent))
    except OSError:  # The folder's permissions may forbid listing it.
        return None
    found = find_projector(beside, file.name)
    return None if found is None else file.parent / found
