"""Linear layers for a draft head: native kernels where they fit, else torch."""

import ctypes
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from mmengine.native import library as native
from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the layer x weight^T + bias, from [t, k] to [t, n], for weight [n, k]."""
    library = kernels_for(weight)
    if library is None:
        return lambda x: F.linear(x, weight, bias)
    return PackedLinear(library, weight, bias)


def scores_of(weight: Tensor) -> tuple[Linear, PackedLinear | None]:
    """Return the layer with a float32 result, and the packed matrix or None."""
    library = kernels_for(weight)
    if library is None:
        return lambda x: F.linear(x, weight).float(), None
    packed = PackedLinear(library, weight)
    return lambda x: packed(x, float32=True), packed


def gated(weight: Tensor) -> Linear:
    """Return silu(x gate^T) * (x up^T), from [t, k] to [t, n]; weight [2n, k] has gate's rows, then up's."""
    library = kernels_for(weight)
    if library is not None:
        return PackedLinear(library, weight, gate_up=True)

    def product(x: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    return product


def kernels_for(weight: Tensor) -> ctypes.CDLL | None:
    """Return the kernels if they can multiply with this matrix, else None."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    return native.load()
