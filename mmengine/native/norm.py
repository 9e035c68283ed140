"""Computes RMS norms with the CPU kernels (src/layers/norms.h)."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mmengine.native.dtypes import DTYPES


class RmsNorm:
    """An RMS norm: x / rms(x) * weight for rows x [..., size] in float32 or bfloat16.

    `weight`: [size], in any float dtype. `rounds_once`: a bfloat16 result is rounded only once, after
    multiplying by the weight; otherwise x / rms(x) is rounded too.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, eps: float, *, rounds_once: bool) -> None:
        self._run, self._eps, self._once = _declare_functions(library), eps, int(rounds_once)
        self._weight = weight.detach().float().contiguous()
        self._address, self._size = self._weight.data_ptr(), len(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        rows, dtype, size = x.reshape(-1, self._size), x.dtype, self._size
        stride, count = rows.stride(), rows.shape[0]
        if count and stride[1] != 1:
            rows = rows.contiguous()
            stride = rows.stride()
        out = torch.empty(x.shape, dtype=dtype)
        self._run(
            *(rows.data_ptr(), stride[0], count, DTYPES[dtype], self._address, size),
            *(self._eps, self._once, out.data_ptr()),
        )
        return out


@cache
def _declare_functions(library: ctypes.CDLL) -> Callable[..., None]:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    run = library.mm_rms_norm
    run.argtypes = (pointer, long, number, number, pointer, number, ctypes.c_float, number, pointer)
    run.restype = None
    return run
