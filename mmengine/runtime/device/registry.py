"""Devices by name. A stranger's come by entry points of the group `mmengine.devices`; see port.py."""

import re
import warnings
from collections.abc import Iterator

import torch

from mmengine.errors import ConfigError
from mmengine.registry import Registry
from mmengine.runtime.device.port import Device

DEVICES: Registry[type[Device]] = Registry(
    "mmengine.devices",
    "device",
    own={
        "cpu": "mmengine.runtime.device.cpu:CpuDevice",
        "cuda": "mmengine.runtime.device.cuda:CudaDevice",
    },
    beside=("auto",),
)
_NAME = re.compile(r"([^\W\d]\w*)(?::(0|[1-9]\d{0,4}))?", re.ASCII)  # a kind, and a number behind it


def open_device(name: str) -> Device:
    """The device called `name`: a kind, and perhaps a number behind a colon; "auto" is the CPU where nothing
    else is there. Raises ConfigError for one that nobody knows, or that cannot be used, which says why."""
    if name == "auto":
        name = next((kind.kind for kind in _others() if kind.is_available()), "cpu")
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in DEVICES.names():
        numbered = [name for kind in DEVICES.names()[1:] for name in (kind, f"{kind}:N")]
        *most, last = ["auto", "cpu", *numbered]
        told = f"use {', '.join(most)} or {last}"
        if _is_torchs(name):
            raise ConfigError(f"device {name!r} is not supported; {told}")
        raise ConfigError(f"{name!r} is no device; {told}")
    kind, index = DEVICES.load(match[1]), int(match[2]) if match[2] else None
    problem = kind.problem(index)
    if problem is not None:
        raise ConfigError(f"device {name} cannot be used: {problem}")
    return kind(index)


def _others() -> Iterator[type[Device]]:
    """All kinds that are not the CPU. A package of a stranger that is broken is passed over."""
    for name in DEVICES.names():
        if name == "cpu":
            continue
        try:
            yield DEVICES.load(name)
        except ConfigError as error:
            warnings.warn(f"{error}", stacklevel=2)


def _is_torchs(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
