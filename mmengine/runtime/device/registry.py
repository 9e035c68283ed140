"""Devices by name. A stranger's come by entry points of the group `mmengine.devices`; see port.py."""

import re
from importlib.metadata import entry_points

import torch

from mmengine.errors import ConfigError
from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.device.port import Device

GROUP = "mmengine.devices"
_OWN: dict[str, type[Device]] = {kind.kind: kind for kind in (CpuDevice, CudaDevice)}
_NAME = re.compile(r"([^\W\d]\w*)(?::(0|[1-9]\d{0,4}))?", re.ASCII)  # a kind, and a number behind it


def open_device(name: str) -> Device:
    """The device called `name`: a kind, and perhaps a number behind a colon; "auto" is the CPU where nothing
    else is there. Raises ConfigError for one that nobody knows, or that cannot be used, which says why."""
    if name == "auto":
        kinds = (device_class(kind) for kind in known_kinds() if kind != "cpu")
        name = next((kind.kind for kind in kinds if kind.is_available()), "cpu")
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in known_kinds():
        numbered = [name for kind in known_kinds()[1:] for name in (kind, f"{kind}:N")]
        *most, last = ["auto", "cpu", *numbered]
        told = f"use {', '.join(most)} or {last}"
        if _is_torchs(name):
            raise ConfigError(f"device {name!r} is not supported; {told}")
        raise ConfigError(f"{name!r} is no device; {told}")
    kind, index = device_class(match[1]), int(match[2]) if match[2] else None
    problem = kind.problem(index)
    if problem is not None:
        raise ConfigError(f"device {name} cannot be used: {problem}")
    return kind(index)


def known_kinds() -> list[str]:
    """This engine's own first, then strangers' by name."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=GROUP)} - _OWN.keys())]


def device_class(kind: str) -> type[Device]:
    """One of `known_kinds`. Raises ConfigError where it cannot be loaded."""
    if kind in _OWN:
        return _OWN[kind]
    point = next(point for point in entry_points(group=GROUP) if point.name == kind)
    try:
        return point.load()
    except Exception as error:  # a stranger's module may raise anything at all
        raise ConfigError(
            f"device {kind} ({point.value}) does not load: {type(error).__name__}: {error}"
        ) from error


def _is_torchs(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
