"""A model of a hub on this machine: what an engine reads of it, and nothing else.

What a hub lists comes from whoever uploaded it. Names are compared with those that may be, sizes are added up
before a byte is fetched, and bytes are compared with the hash that stands in the list.
"""

import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mmengine.checkpoint.files import MAX_JSON_BYTES
from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, indexed_files
from mmengine.errors import ModelError
from mmengine.hubs.huggingface import HuggingFace
from mmengine.hubs.modelscope import ModelScope
from mmengine.hubs.names import HUGGING_FACE, MODELSCOPE, TITLES, HubName
from mmengine.hubs.port import Hub, HubError, HubFile, no_file

MAX_LISTED_FILES = 100_000  # of a model's revision; the largest checkpoints have some thousands
MAX_SMALL_FILES = 64  # configs, tokenizers, templates; models of the hub have some ten
MAX_MODEL_BYTES = 4 * 2**40  # all that is fetched of a model; the largest open one has 1.1 TB
HUBS: dict[str, Callable[[HubName], Hub]] = {HUGGING_FACE: HuggingFace, MODELSCOPE: ModelScope}
# Never pickles, never code; of the top folder alone.
_SMALL = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}\.(json|jinja|txt)", re.ASCII)
_WEIGHTS = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}\.safetensors", re.ASCII)


def fetch_model(name: HubName) -> Path:
    """The folder of a model: downloaded, or as it is in the hub's cache where the hub cannot be asked. Raises
    ModelError, one sentence each, for what is not there, may not be had, is too large or came broken."""
    return fetch_from(HUBS[name.hub](name), name)


def fetch_from(hub: Hub, name: HubName) -> Path:
    """The same of a hub that is there."""
    try:
        listed = hub.list_files()
    except HubError as error:
        folder = hub.find() if error.is_network else None
        if folder is None or not (folder / "config.json").is_file():
            raise
        return folder
    if len(listed) > MAX_LISTED_FILES:
        raise ModelError(
            f"{name} has {len(listed)} files at {TITLES[name.hub]}; at most {MAX_LISTED_FILES} are read"
        )
    small = sorted(
        file for file in listed if _SMALL.fullmatch(file) and listed[file].num_bytes <= MAX_JSON_BYTES
    )
    if "config.json" not in small:
        raise ModelError(
            f"{name} has no config.json at {TITLES[name.hub]}, so it is no model as transformers has them; "
            "give another"
        )
    if len(small) > MAX_SMALL_FILES:
        raise ModelError(
            f"{name} has {len(small)} files beside its weights; at most {MAX_SMALL_FILES} are fetched"
        )
    in_parts = SINGLE_FILE not in listed and INDEX_FILE in small  # as `weight_files` takes them
    _check_room(hub, name, listed, [*small, *([] if in_parts else [SINGLE_FILE])])
    folder = hub.fetch(small)
    weights = indexed_files(folder) if in_parts else [SINGLE_FILE]
    for file in weights:
        if not _WEIGHTS.fullmatch(file):
            raise ModelError(
                f"{INDEX_FILE} of {name} names {file[:100]!r}, which is no usable name of a file"
            )
        if file not in listed:
            if file == SINGLE_FILE:
                raise ModelError(
                    f"{name} has no weights at {TITLES[name.hub]}: neither {SINGLE_FILE} nor {INDEX_FILE}"
                )
            raise no_file(name, file)
    _check_room(hub, name, listed, weights)
    return hub.fetch(weights)


def fetch_adapter(name: HubName) -> Path:
    """The folder of a LoRA adapter likewise: its two files. Raises ModelError."""
    return adapter_from(HUBS[name.hub](name), name)


def adapter_from(hub: Hub, name: HubName) -> Path:
    """The same of a hub that is there."""
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
                f"{name} has no {file} at {TITLES[name.hub]}, so it is no LoRA adapter as PEFT saves it; "
                "give another"
            )
    _check_room(hub, name, listed, (CONFIG_FILE, WEIGHTS_FILE))
    return hub.fetch([CONFIG_FILE, WEIGHTS_FILE])


def _check_room(hub: Hub, name: HubName, listed: Mapping[str, HubFile], names: Collection[str]) -> None:
    """Before anything is fetched. Raises ModelError where it is too much, or more than the disk has room
    for."""
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
            f"{name} needs {wanted / 1e9:,.1f} GB more in {hub.cache}, and {free / 1e9:,.1f} are free; make "
            "room, or let its cache be on another disk"
        )
