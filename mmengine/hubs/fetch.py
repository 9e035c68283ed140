"""Fetches models, model descriptions (config, tokenizer and processor files) and LoRA adapters from a hub.
Only files that the engine reads are fetched.

A model's uploader controls the hub's file list, so the list is not trusted. Names must match the allowed
patterns, the files' total size is checked before each download, and the fetched bytes are compared with the
hashes in the list.
"""

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mmengine.checkpoint.files import MAX_JSON_BYTES
from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, indexed_files
from mmengine.errors import ModelError
from mmengine.hubs.gguf import cached_gguf, fetch_gguf, has_gguf
from mmengine.hubs.hub import Hub, HubError, HubFile, no_file
from mmengine.hubs.huggingface import HuggingFace
from mmengine.hubs.modelscope import ModelScope
from mmengine.hubs.names import HUGGING_FACE, MODELSCOPE, TITLES, HubName

MAX_LISTED_FILES = 100_000  # Per model revision; the largest checkpoints have a few thousand files.
MAX_SMALL_FILES = 64  # Limit for config, tokenizer and template files; a typical model has about ten.
MAX_MODEL_BYTES = 4 * 2**40  # Limit for all fetched files of a model; the largest open model has 1.1 TB.
HUBS: dict[str, Callable[[HubName], Hub]] = {HUGGING_FACE: HuggingFace, MODELSCOPE: ModelScope}
# The files to fetch besides weights: no pickles, no code, and only files in the top folder.
_SMALL = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}\.(json|jinja|txt)", re.ASCII)
_WEIGHTS = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}\.safetensors", re.ASCII)


def fetch_model(name: HubName) -> Path:
    """Download a model and return its folder, or its GGUF file. If the hub does not answer, return the
    model's folder or file in the hub's cache.

    Raises ModelError for a model that is missing, not accessible, too large or damaged.
    """
    return fetch_from(HUBS[name.hub](name), name)


def fetch_from(hub: Hub, name: HubName) -> Path:
    """Do the work of `fetch_model` with the given hub client."""
    if name.tag is not None:
        return fetch_gguf(hub, name, check_room)
    try:
        listed = hub.list_files()
    except HubError as error:
        folder = hub.find() if error.is_network else None
        if folder is None:
            raise
        if not any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
            return cached_gguf(folder, name, error)
        if not (folder / "config.json").is_file():
            raise
        return folder
    if SINGLE_FILE not in listed and INDEX_FILE not in listed and has_gguf(hub):
        return fetch_gguf(hub, name, check_room)
    small = _small_files(name, listed)
    in_parts = SINGLE_FILE not in listed and INDEX_FILE in small  # Same rule as in checkpoint/tensors.py
    check_room(hub, name, listed, [*small, *([] if in_parts else [SINGLE_FILE])])
    folder = hub.fetch(small)
    weights = indexed_files(folder) if in_parts else [SINGLE_FILE]
    for file in weights:
        if not _WEIGHTS.fullmatch(file):
            raise ModelError(f"{INDEX_FILE} of {name} names {file[:100]!r}, which is not a valid file name")
        if file not in listed:
            if file == SINGLE_FILE:
                raise ModelError(
                    f"{name} has no weights at {TITLES[name.hub]}: neither {SINGLE_FILE} nor {INDEX_FILE}"
                )
            raise no_file(name, file)
    check_room(hub, name, listed, weights)
    return hub.fetch(weights)


def fetch_description(name: HubName) -> tuple[Path, int]:
    """Download a model's config, tokenizer and processor files.

    Returns their folder, and the number of weight bytes that `fetch_model` would download. Raises ModelError
    as `fetch_model` does.
    """
    return description_from(HUBS[name.hub](name), name)


def description_from(hub: Hub, name: HubName) -> tuple[Path, int]:
    """Do the work of `fetch_description` with the given hub client."""
    if name.tag is not None:
        raise ModelError(f"{name} is a GGUF file, which describes itself; download it, and give the file")
    listed = hub.list_files()
    small = _small_files(name, listed)
    check_room(hub, name, listed, small)
    folder = hub.fetch(small)
    in_parts = SINGLE_FILE not in listed and INDEX_FILE in small
    weights = indexed_files(folder) if in_parts else [SINGLE_FILE]
    return folder, sum(listed[file].num_bytes for file in weights if file in listed)


def _small_files(name: HubName, listed: Mapping[str, HubFile]) -> list[str]:
    """Return the files to fetch besides the weights. Raises ModelError if there are too many such files, or
    if config.json is missing.
    """
    if len(listed) > MAX_LISTED_FILES:
        raise ModelError(
            f"{name} has {len(listed)} files at {TITLES[name.hub]}; at most {MAX_LISTED_FILES} are read"
        )
    small = sorted(
        file for file in listed if _SMALL.fullmatch(file) and listed[file].num_bytes <= MAX_JSON_BYTES
    )
    if "config.json" not in small:
        raise ModelError(
            f"{name} has no config.json at {TITLES[name.hub]}, so it is no transformers model; give another"
        )
    if len(small) > MAX_SMALL_FILES:
        raise ModelError(
            f"{name} has {len(small)} files beside its weights; at most {MAX_SMALL_FILES} are fetched"
        )
    return small


def fetch_adapter(name: HubName) -> Path:
    """Download the two files of a LoRA adapter and return their folder.

    Falls back to the cache, and raises ModelError, as `fetch_model` does.
    """
    return adapter_from(HUBS[name.hub](name), name)


def adapter_from(hub: Hub, name: HubName) -> Path:
    """Do the work of `fetch_adapter` with the given hub client."""
    try:
        listed = hub.list_files()
    except HubError as error:
        folder = hub.find() if error.is_network else None
        if folder is None or not (folder / CONFIG_FILE).is_file():
            raise
        return folder
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if file not in listed:
            raise ModelError(
                f"{name} has no {file} at {TITLES[name.hub]}, so it is no LoRA adapter in PEFT's format; "
                "give another"
            )
    check_room(hub, name, listed, (CONFIG_FILE, WEIGHTS_FILE))
    return hub.fetch([CONFIG_FILE, WEIGHTS_FILE])


def check_room(hub: Hub, name: HubName, listed: Mapping[str, HubFile], names: Collection[str]) -> None:
    """Raise ModelError if the files exceed the size limit or the free disk space. Called before each
    download.
    """
    files = [listed[file] for file in names if file in listed]
    total = sum(file.num_bytes for file in files)
    if total > MAX_MODEL_BYTES:
        raise ModelError(
            f"{name} has {total / 1e9:,.0f} GB; at most {MAX_MODEL_BYTES / 1e9:,.0f} are fetched"
        )
    wanted = sum(file.missing_bytes for file in files)
    place = next(each for each in (hub.cache, *hub.cache.parents) if each.exists())
    free = shutil.disk_usage(place).free
    if wanted > free:
        raise ModelError(
            f"{name} needs {wanted / 1e9:,.1f} GB more in {hub.cache}, and {free / 1e9:,.1f} GB are free; "
            "free some space, or move the cache to another disk"
        )
