"""A draft head's linear layers, computed by a native kernel if it supports the matrix, otherwise by
torch.
"""

import ctypes
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from mmengine.native import library as native
from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a function that maps x [t, k] to x weight^T + bias [t, n]. `weight`: [n, k]."""
    library = kernels_for(weight)
    if library is None:
        return lambda x: F.linear(x, weight, bias)
    return PackedLinear(library, weight, bias)


def scores_of(weight: Tensor) -> tuple[Linear, PackedLinear | None]:
    """Return a function that maps x to x weight^T in float32, and the packed matrix.

    The packed matrix is None if torch computes the function.
    """
    library = kernels_for(weight)
    if library is None:
        return lambda x: F.linear(x, weight).float(), None
    packed = PackedLinear(library, weight)
    return lambda x: packed(x, float32=True), packed


def gated(weight: Tensor) -> Linear:
    """Return a function that maps x [t, k] to silu(x gate^T) * (x up^T) [t, n].

    `weight` [2n, k]: the first n rows are the matrix gate, the last n rows are the matrix up.
    """
    library = kernels_for(weight)
    if library is not None:
        return PackedLinear(library, weight, gate_up=True)

    def product(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    return product


def kernels_for(weight: Tensor) -> ctypes.CDLL | None:
    """Return the native library if its kernels can multiply with this matrix, otherwise None."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return native.load()
