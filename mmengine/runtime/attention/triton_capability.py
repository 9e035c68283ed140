"""Checks whether the Triton attention kernels can be used on this machine, and says what is missing."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from mmengine.errors import ConfigError, in_one_line
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import too_old
from mmengine.runtime.device.port import Device
from mmengine.runtime.kv.pool import KVPool

CAPABILITY = (8, 0)  # the lowest compute capability with bfloat16 tensor cores
MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTALL = "it comes with torch for CUDA; else pip install 'triton>=3.6,<4'"


def package_problem() -> str | None:
    """Return why the package `triton` cannot be used and how to install it, or None."""
    return None if find_spec("triton") is not None else f"triton is not installed; {INSTALL}"


def missing(device: Device) -> str | None:
    """Return what this machine lacks for the kernels, and how to add it, or None."""
    problem = package_problem()
    if problem is not None:
        return problem
    capability = device.compute_capability()
    return None if capability is None else too_old(capability, CAPABILITY)


def unfit(spec: ModelSpec, kv: KVPool) -> str | None:
    """Return why the kernels do not support this pool, or None if they do.

    On a CPU the kernels run only in Triton's interpreter, which TRITON_INTERPRET=1 selects. The interpreter
    is meant for tests: it is slow, and its results in bfloat16 are wrong.
    """
    if kv.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 and float16, not {str(kv.dtype).removeprefix('torch.')}"
    if spec.head_dim % 2 or spec.head_dim > MAX_HEAD_DIM:
        return f"it supports heads of 2, 4, 6 … {MAX_HEAD_DIM} values, not of {spec.head_dim}"
    problem = missing(kv.device)
    if problem is not None:
        return problem
    is_gpu = kv.device.compute_capability() is not None
    if not is_gpu and not _is_interpreted():
        return f"it computes on a GPU, but the KV pool is on {kv.device.name}"
    if not is_gpu and kv.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return None


def load() -> ModuleType:
    """Import the kernels. Raises ConfigError if Triton cannot be imported."""
    try:
        return import_module("mmengine.gpu.attention_kernels")
    # Triton raises several exception types if the driver is missing, or if Triton's modules have different
    # versions.
    except Exception as error:
        raise ConfigError(
            f"attention 'triton' cannot be used: importing it fails ({in_one_line(error)}); choose 'torch' "
            "or 'auto'"
        ) from error


def _is_interpreted() -> bool:
    triton = import_module("triton")
    return not isinstance(load()._attend_kernel, triton.runtime.JITFunction)
