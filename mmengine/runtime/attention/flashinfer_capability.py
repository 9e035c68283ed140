"""Whether FlashInfer can be used here, and why not. It is imported only when it is."""

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
OLDEST, BEYOND = (0, 7, 2), (0, 8)  # what its signatures were checked for
CAPABILITY = (8, 0)  # of the GPU, from which the fa2 kernels exist
HEAD_DIMS = (64, 128, 256)
QUERY_DTYPES = (torch.bfloat16, torch.float16)
INSTALL = install_hint("cuda")


def missing(device: Device) -> str | None:
    """What is missing on this machine, with what to do about it; None where nothing is."""
    problem = package_problem()
    if problem is not None:
        return problem
    capability = device.compute_capability()
    if capability is None:
        return f"it computes on a GPU, and the KV pool lies on {device.name}"
    return too_old(capability, CAPABILITY)


def package_problem() -> str | None:
    """What is wrong with the package as it is installed, or not, with what to do about it."""
    version = installed()
    if version is None:
        return f"{PACKAGE} is not installed; {INSTALL}"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST or numbers[:2] >= BEYOND:
        wanted = f"{'.'.join(map(str, OLDEST))} up to, not including, {'.'.join(map(str, BEYOND))}"
        return f"{PACKAGE} {version} is installed, and {wanted} is needed; {INSTALL}"
    return None


def unfit(spec: ModelSpec, kv: KVPool) -> str | None:
    """Why it cannot attend over this pool, or None where it can."""
    dtype = kv.dtype
    if dtype not in QUERY_DTYPES:
        return f"it computes in bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if spec.head_dim not in HEAD_DIMS:
        return f"it knows heads of {', '.join(map(str, HEAD_DIMS))} values, not of {spec.head_dim}"
    return missing(kv.device)


def installed() -> str | None:
    """Its version, or None."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def load() -> ModuleType:
    """The package. Raises ConfigError where importing it fails."""
    try:
        return import_module("flashinfer")
    except Exception as error:  # a library of CUDA that is missing is an OSError, and there is more
        raise ConfigError(
            f"{PACKAGE} is installed but cannot be imported ({type(error).__name__}: {error}); {INSTALL} "
            "anew, or choose attention 'torch'"
        ) from error
