"""Linear layers in torch. For bfloat16 on a CPU, torch would reorder a weight to oneDNN's blocked form in
each call, which takes as long as the product with a few rows. This module reorders once.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # Takes a weight [n, k] and a bias.

# oneDNN chooses a form for a number of rows. The form for 16 rows is fast for one row and for thousands.
_ROWS = 16


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a function from x [t, k] to x weight^T + bias, [t, n], for a weight [n, k]. A reordered `weight`
    is not kept.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not reorders():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


@cache
def reorders() -> bool:
    """Return whether this build of torch has oneDNN's reordering operations, and the CPU bfloat16.

    The operations are private to torch, so a missing operation, or a call that it refuses, is no error.
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
