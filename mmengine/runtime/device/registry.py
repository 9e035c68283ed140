"""Opens devices by name. A third-party device is an entry point in the group `mmengine.devices` (port.py)."""

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
_NAME = re.compile(r"([^\W\d]\w*)(?::(0|[1-9]\d{0,4}))?", re.ASCII)  # a kind, possibly with a number


def open_device(name: str) -> Device:
    """Return the device with this name: a kind, possibly followed by a colon and a number, or "auto".

    "auto" selects the first available device that is not a CPU, or else the CPU. Raises ConfigError if the
    device is unknown or unusable.
    """
    if name == "auto":
        name = next((kind.kind for kind in _others() if kind.is_available()), "cpu")
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in DEVICES.names():
        numbered = [name for kind in DEVICES.names()[1:] for name in (kind, f"{kind}:N")]
        *most, last = ["auto", "cpu", *numbered]
        told = f"use {', '.join(most)} or {last}"
        if _is_torchs(name):
            raise ConfigError(f"device {name!r} is not supported; {told}")
        raise ConfigError(f"{name!r} is not a device; {told}")
    kind, index = DEVICES.load(match[1]), int(match[2]) if match[2] else None
    problem = kind.problem(index)
    if problem is not None:
        raise ConfigError(f"device {name} cannot be used: {problem}")
    return kind(index)


def _others() -> Iterator[type[Device]]:
    """Yield all kinds of devices except the CPU. Third-party packages that cannot be imported are skipped."""
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
