"""Linear layers in torch whose weights are reordered once. For bfloat16 on a CPU, torch would otherwise
reorder a weight to oneDNN's blocked layout in each call. The reordering takes as long as the product with a
few rows.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # Takes a weight [n, k] and a bias.

# oneDNN selects a layout for an expected number of rows. The layout for 16 rows is fast for a single row and
# for thousands of rows.
_ROWS = 16


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a function that maps x [t, k] to x weight^T + bias [t, n]. `weight`: [n, k]. A function with a
    reordered weight keeps no reference to `weight`.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not reorders():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


@cache
def reorders() -> bool:
    """Return whether this CPU supports torch's oneDNN operations for reordered bfloat16 weights.

    The operations are private to torch. If one is missing or raises an error, the result is False.
    """
    try:
        ops = torch.ops.mkldnn
        if not (torch.backends.mkldnn.is_available() and ops._is_mkldnn_bf16_supported()):
            return False
        ones = torch.ones(32, 32, dtype=torch.bfloat16)
        product = ops._linear_pointwise(ones, ops._reorder_linear_weight(ones, _ROWS), None, "none", [], "")
        return bool((product == 32).all())
    except (AttributeError, RuntimeError, TypeError):
        return False
