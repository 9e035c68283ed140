"""Picks a GGUF model's files at a hub by llama.cpp's rules, and downloads the files: the model, which may be
split into parts, and the projector (mmproj).
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mmengine.checkpoint.gguf.file_names import (
    DEFAULT_TAGS,
    SUFFIX,
    find_model,
    find_projector,
    part_name,
    parts_of,
)
from mmengine.checkpoint.gguf.pair import pair, projector_file
from mmengine.checkpoint.gguf.split import MAX_PARTS
from mmengine.errors import ModelError
from mmengine.hubs.hub import Hub, HubError, HubFile, no_file
from mmengine.hubs.names import TITLES, HubName

_PATH = re.compile(r"([A-Za-z0-9_][\w.-]{0,127}/){0,3}[A-Za-z0-9_][\w.-]{0,191}\.gguf", re.ASCII)
CheckRoom = Callable[[Hub, HubName, Mapping[str, HubFile], Collection[str]], None]


def has_gguf(hub: Hub) -> bool:
    """Return whether a hub's model has GGUF files, in the top folder or in other folders."""
    return bool(_paths(hub.list_files(folders=True)))


def fetch_gguf(hub: Hub, name: HubName, check_room: CheckRoom) -> Path:
    """Download the GGUF file that `name.tag` picks, with all parts and the projector. Return the GGUF file's
    path.

    Falls back to the cache if the hub does not answer. `check_room`: raises ModelError if files are too large
    for this machine. Raises ModelError if no file has the tag, or if a part is missing.
    """
    try:
        listed = hub.list_files(folders=True)
    except HubError as error:
        folder = hub.find() if error.is_network else None
        if folder is None:
            raise
        return cached_gguf(folder, name, error)
    model, projector = _pick(_paths(listed), name)
    files = [*parts_of(_paths(listed), model), *([projector] if projector else [])]
    _check_parts(files, model, name)
    check_room(hub, name, listed, files)
    return _path(hub.fetch(files), model, projector)


def cached_gguf(folder: Path, name: HubName, reason: HubError) -> Path:
    """Return the file that `name.tag` picks in the cache. Raises `reason` if the cache has no such file."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}"))
    paths = [path for path in found if _PATH.fullmatch(path)]
    model = find_model(paths, name.tag or "")
    if model is None or len(parts_of(paths, model)) != part_name(model).parts:
        raise reason
    return _path(folder, model, find_projector(paths, model))


def _paths(listed: Mapping[str, HubFile]) -> list[str]:
    """Return the hub's GGUF files whose paths match _PATH, in the hub's order."""
    return [path for path in listed if _PATH.fullmatch(path)]


def _pick(paths: list[str], name: HubName) -> tuple[str, str | None]:
    model = find_model(paths, name.tag or "")
    if model is None:
        there = ", ".join(path for path in paths if part_name(path).number == 1)[:300]
        raise ModelError(
            f"{name.repo} has no GGUF file with the tag {name.tag or DEFAULT_TAGS[0]} at {TITLES[name.hub]}; "
            f"there are: {there or 'none'}"
        )
    return model, find_projector(paths, model)


def _check_parts(files: list[str], model: str, name: HubName) -> None:
    first = part_name(model)
    if first.parts > MAX_PARTS:
        raise ModelError(f"{model} of {name} is one of {first.parts} parts; the limit is {MAX_PARTS}")
    for number in range(2, first.parts + 1):
        if first.of(number) not in files:
            raise no_file(name, first.of(number))


def _path(folder: Path, model: str, projector: str | None) -> Path:
    """Return the model's path. If the default search would miss the projector, return a path that names both
    files (checkpoint/gguf/pair.py).
    """
    path = folder / model
    if projector is None or projector_file(path) == folder / projector:
        return path
    return Path(pair(path, folder / projector))
