"""Checks whether FlashInfer can be used on this machine. The checks do not import the package."""

import re
from importlib import import_module, metadata
from types import ModuleType

import torch

from mmengine.errors import ConfigError
from mmengine.extras import install_hint
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import too_old
from mmengine.runtime.device.port import Device
from mmengine.runtime.kv.pool import KVPool

PACKAGE = "flashinfer-python"
OLDEST, BEYOND = (0, 7, 2), (0, 8)  # supported versions: OLDEST <= version < BEYOND
CAPABILITY = (8, 0)  # the lowest compute capability with fa2 kernels
HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.bfloat16, torch.float16)
INSTALL = install_hint("cuda")


def missing(device: Device) -> str | None:
    """Return why this machine cannot run FlashInfer, or None if it can."""
    problem = package_problem()
    if problem is not None:
        return problem
    capability = device.compute_capability()
    if capability is None:
        return f"it computes on a GPU, but the KV pool is on {device.name}"
    return too_old(capability, CAPABILITY)


def package_problem() -> str | None:
    """Return why the installed package is not usable, or None if it is usable."""
    version = installed()
    if version is None:
        return f"{PACKAGE} is not installed; {INSTALL}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST or numbers[:2] >= BEYOND:
        wanted = f"{'.'.join(map(str, OLDEST))} up to, not including, {'.'.join(map(str, BEYOND))}"
        return f"{PACKAGE} {version} is installed, and {wanted} is needed; {INSTALL}"
    return None


def unfit(spec: ModelSpec, kv: KVPool) -> str | None:
    """Return why FlashInfer does not support this KV pool, or None."""
    dtype = kv.dtype
    if dtype not in QUERY_DTYPES:
        return f"it computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if spec.head_dim not in HEAD_DIMS:
        return f"it supports heads of {', '.join(map(str, HEAD_DIMS))} values, not of {spec.head_dim}"
    return missing(kv.device)


def installed() -> str | None:
    """Return the installed version, or None if the package is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def load() -> ModuleType:
    """Import the package. Raises ConfigError if the import fails."""
    try:
        return import_module("flashinfer")
    except Exception as error:  # OSError if a CUDA library is missing; other types occur too
        raise ConfigError(
            f"{PACKAGE} is installed but cannot be imported ({type(error).__name__}: {error}); {INSTALL} "
            "anew, or choose attention 'torch'"
        ) from error
