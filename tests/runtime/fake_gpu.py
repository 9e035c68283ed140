"""A fake GPU on which every operation that would wait for the device raises an error.

Tensors are on torch's "meta" device and have no values. Operations that need values therefore raise an error:
`item`, `tolist`, `if tensor`, and result shapes that depend on values (`nonzero`, a boolean index,
`repeat_interleave` without a size). Copies must be non-blocking, and copies from the host must come from
pinned memory.
"""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmengine.runtime.device.cpu import CpuDevice
from mmengine.runtime.device.placement import Placement

GPU = torch.device("meta")
aten = torch.ops.aten


class AbsentGpu(CpuDevice):
    kind, is_async = "gpu", True

    def __init__(self):
        self.name, self.torch_device = self.kind, GPU


ON_GPU = Placement(AbsentGpu(), torch.float32, "torch")


class Waited(AssertionError):
    """An operation waited for the device."""


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        options = options or {}
        if options.get("pin_memory"):
            return pinned(operation(*arguments, **{**options, "pin_memory": False}))
        if operation in (aten.pin_memory.default, aten._pin_memory.default):
            return pinned(arguments[0].clone())
        if (
            operation.namespace == "aten" and operation._can_decompose()
        ):  # inference mode does not decompose `to`
            with self:
                made = operation.decompose(*arguments, **options)
            if made is not NotImplemented:
                return made
        if operation is aten._to_copy.default:
            return self._copy(operation, arguments, options)
        if operation is aten.copy_.default:
            target, source, *given = arguments
            _check(source, target.device, given[0] if given else options.get("non_blocking"))
            if source.device == GPU and target.device.type == "cpu":
                if not _is_pinned(target):
                    raise Waited("a copy into memory that is not pinned waits for the device")
                return target
        return operation(*arguments, **options)

    def _copy(self, operation, arguments, options):
        source, to = arguments[0], torch.device(options.get("device") or arguments[0].device)
        _check(source, to, options.get("non_blocking"))
        if source.device == GPU and to.type == "cpu":
            return torch.empty(source.shape, dtype=options.get("dtype") or source.dtype)
        return operation(*arguments, **options)


class _NoMaking(TorchFunctionMode):
    """Raises if a device tensor is made from Python numbers, because copying them waits for the device."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = options or {}
        if (
            function in (torch.tensor, torch.as_tensor)
            and torch.device(options.get("device") or "cpu") == GPU
        ):
            raise Waited("a tensor made of numbers on the device waits for it")
        return function(*arguments, **options)


_pins: dict[int, torch.Tensor] = {}  # address -> pinned tensor, kept alive so that its address stays unique


def pinned(tensor):
    """Mark `tensor` and all views of it as pinned."""
    _pins[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor):
    return tensor.untyped_storage().data_ptr() in _pins


def _check(source, to, non_blocking):
    """Raise if a copy waits. Empty tensors and copies within a device are ignored."""
    if source.device.type == to.type or not source.numel():
        return
    from_pageable = source.device.type == "cpu" and not _is_pinned(source)
    if from_pageable or not non_blocking:
        raise Waited(f"a copy of {tuple(source.shape)} from {source.device} to {to} waits for the device")


@contextmanager
def nothing_to_wait_for():
    """Return a context in which an operation that would wait for the GPU raises an error."""
    try:
        with _NoMaking(), _NoWaiting():
            yield
    finally:
        _pins.clear()
