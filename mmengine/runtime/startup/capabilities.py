"""Describes which devices and kernels the engine can use on this machine, and why it cannot use others.

The checks load the native kernels, but compile nothing and run nothing on a GPU.
"""

import torch.distributed as dist

from mmengine.native.library import describe, load
from mmengine.runtime.attention import flashinfer_capability, triton_capability
from mmengine.runtime.device.cuda import CudaDevice


def no_gpu() -> str | None:
    """Return why no GPU can be used, and how to solve the problem. None: a GPU can be used."""
    return CudaDevice.problem(None)


def gpus() -> list[str]:
    """Return one line for each usable GPU: name, compute capability, memory."""
    return CudaDevice.describe() if no_gpu() is None else []


def attention() -> dict[str, str]:
    """Return backend -> "usable", or a text that says what is missing and how to install it."""
    found = {}
    for name, its in (("flashinfer", flashinfer_capability), ("triton", triton_capability)):
        missing = its.package_problem() or no_gpu() or its.missing(CudaDevice(0))
        found[name] = "usable" if missing is None else f"not usable: {missing}"
    found["native"] = "usable on a CPU" if load() is not None else f"not usable: {describe()}"
    return found | {"torch": "usable on any device"}


def automatic_attention() -> str:
    """Return the backends that `attention="auto"` selects on a GPU (if available) and on a CPU."""
    usable = {name for name, text in attention().items() if text.startswith("usable")}
    on_cpu = "native" if "native" in usable else "torch"
    if no_gpu() is not None:
        return on_cpu
    on_gpu = next(name for name in (*CudaDevice.attention, "torch") if name in usable)
    return f"{on_gpu} on a GPU, {on_cpu} on a CPU"


def tensor_parallel() -> str:
    """Return on how many devices a model can be sharded, and which library connects them."""
    if not dist.is_available():
        return "not usable: this torch is built without torch.distributed"
    count = 0 if no_gpu() is not None else CudaDevice.count()
    if not count or not dist.is_nccl_available():
        missing = "there is no GPU" if not count else "this torch is built without NCCL"
        return f"on a CPU, by gloo; {missing}"
    return f"up to {count} GPUs, by NCCL"
