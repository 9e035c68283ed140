"""Linear layers of a draft head: our kernels where they fit, else torch."""

import ctypes
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from mmengine.native import library as native
from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [t, k] to x weight^T + bias, [t, n], weight [n, k]."""
    library = _library(weight)
    if library is None:
        return lambda x: F.linear(x, weight, bias)
    return PackedLinear(library, weight, bias)


def scores_of(weight: Tensor) -> Linear:
    """The same in float32."""
    library = _library(weight)
    if library is None:
        return lambda x: F.linear(x, weight).float()
    packed = PackedLinear(library, weight)
    return lambda x: packed(x, float32=True)


def gated(weight: Tensor) -> Linear:
    """weight [2n, k], gate's rows and then up's: x [t, k] to silu(x gate^T) * (x up^T), [t, n]."""
    library = _library(weight)
    if library is not None:
        return PackedLinear(library, weight, gate_up=True)

    def product(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    return product


def _library(weight: Tensor) -> ctypes.CDLL | None:
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return native.load()
