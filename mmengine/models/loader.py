"""Finds or downloads a model's files. A model is a folder, a GGUF file, a hub id, or the included model."""

from pathlib import Path

from mmengine.checkpoint.gguf.file_names import SUFFIX as GGUF_SUFFIX
from mmengine.checkpoint.gguf.pair import NO_PROJECTOR, gguf_file, pair, parts_of_pair
from mmengine.checkpoint.model_files import is_gguf, model_weight_files
from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.errors import ModelError
from mmengine.hubs.fetch import fetch_adapter, fetch_description, fetch_model
from mmengine.hubs.names import HubName, parse_name
from mmengine.registry import entry_points

CHECKPOINT_GROUP = "mmengine.checkpoints"
DEFAULT_CHECKPOINT = "default"


def resolve_folder(model: str | Path | None) -> Path:
    """Return the folder or the GGUF file for `model`. Raises ModelError.

    `model`: None for the included checkpoint, an existing folder or GGUF file, or a hub id. Returned paths
    are absolute. Files that are not in the hub's cache are downloaded.
    """
    name, projector = (model, None) if model is None else parts_of_pair(model)
    found = _local_or_hub(model if projector is None else name)
    path = fetch_model(found) if isinstance(found, HubName) else found
    return path if projector is None else _with_projector(path, projector)


def resolve_description(model: str | Path | None) -> tuple[Path, int]:
    """Return the folder or the GGUF file that describes `model`, and the size of its weights in bytes.

    For a model on a hub, only the config, tokenizer and processor files are downloaded. Raises ModelError.
    """
    if model is not None and parts_of_pair(model)[1] is not None:
        found: Path | HubName = resolve_folder(model)
    else:
        found = _local_or_hub(model)
    if isinstance(found, HubName):
        return fetch_description(found)
    files = model_weight_files(found) if is_gguf(found) else found.glob("*.safetensors")
    return found, sum(file.stat().st_size for file in files)


def _local_or_hub(model: str | Path | None) -> Path | HubName:
    """Return the folder or GGUF file on this machine, or the model's name on a hub. Raises ModelError."""
    if model is None:
        return _embedded_folder()
    if not str(model).strip():
        raise ModelError("the model's name is empty; give a folder or a hub id, or none at all")
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder.resolve()
        if is_gguf(folder):
            # Links are not resolved, because a hub's cache links to files without the suffix .gguf.
            return folder.absolute()
        is_file = folder.exists()
    # The name is too long, has a null byte, or names an unknown user's home folder.
    except (OSError, RuntimeError, ValueError):
        raise ModelError(f"{str(model)[:200]!r} is not a valid path or hub id") from None
    if is_file:
        raise ModelError(
            f"{folder} is a file; give the folder that holds config.json and the weights, or a .gguf file"
        )
    if folder.suffix == GGUF_SUFFIX:
        raise ModelError(f"there is no file {str(model)[:200]}; give a GGUF file that is on this machine")
    name = None if isinstance(model, Path) else parse_name(model)
    if name is None:
        raise ModelError(
            f"there is no model folder {str(model)[:200]}; give one with config.json and the weights, or a "
            "hub id as owner/name, modelscope:owner/name or owner/name@revision, or for a GGUF file "
            "owner/name:TAG"
        )
    return name


def _with_projector(model: Path, projector: str) -> Path:
    """Return a path that names both a GGUF file and its projector. Raises ModelError."""
    if not is_gguf(model):
        raise ModelError(f"{model} is no GGUF file, so it has no projector; leave --mmproj out")
    if projector == NO_PROJECTOR:
        return Path(pair(gguf_file(model), projector))
    file = Path(projector).expanduser()
    if not file.is_file():
        raise ModelError(f"there is no projector {projector[:200]}; give a GGUF file that is on this machine")
    return Path(pair(gguf_file(model), file.absolute()))


def resolve_adapter(source: str | Path) -> Path:
    """Return a LoRA adapter's folder. `source`: an existing folder, or a hub id. An adapter that is not in
    the hub's cache is downloaded. Raises ModelError.
    """
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return folder.resolve()
    # The name is too long, has a null byte, or names an unknown user's home folder.
    except (OSError, RuntimeError, ValueError):
        raise ModelError(f"{str(source)[:200]!r} is not a valid path or hub id") from None
    name = None if isinstance(source, Path) else parse_name(source)
    if name is None:
        raise ModelError(
            f"there is no adapter folder {str(source)[:200]}; give one with {CONFIG_FILE} and "
            f"{WEIGHTS_FILE}, or a "
            "hub id as owner/name"
        )
    return fetch_adapter(name)


def _embedded_folder() -> Path:
    all_points = entry_points(group=CHECKPOINT_GROUP)
    points = {point.value: point for point in all_points if point.name == DEFAULT_CHECKPOINT}
    if not points:
        raise ModelError(
            "the included checkpoint is not installed (no entry point "
            f'"{DEFAULT_CHECKPOINT}" in the group "{CHECKPOINT_GROUP}"); name a model folder or a hub id'
        )
    if len(points) > 1:
        raise ModelError(f"several packages provide the included checkpoint: {', '.join(sorted(points))}")
    value, point = points.popitem()
    try:
        folder = Path(point.load()())
    except Exception as error:  # A function in another package may raise any exception.
        raise ModelError(f"the included checkpoint ({value}) does not load: {error}") from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"the included checkpoint is missing from {folder}; install mmengine again")
    return folder
