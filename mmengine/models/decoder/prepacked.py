"""Linear layers of torch. In bfloat16 on a CPU, torch would bring a weight into oneDNN's blocked form anew
at each call, which takes as long as the product of a few rows; here that is done once."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # of a weight [n, k] and a bias

# oneDNN chooses its form for a number of rows. The one for 16 serves one row and thousands as well.
_ROWS = 16


def linear_of(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [t, k] to x weight^T + bias, [t, n], weight [n, k]. Where it reorders, it does not keep `weight`."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not reorders():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, bias, "none", [], "")


@cache
def reorders() -> bool:
    """Whether this build of torch has oneDNN's operations for it, and the CPU bfloat16. They are private to
    torch, so their absence, or a call that they do not take, is no error."""
    try:
        ops = torch.ops.mkldnn
        if not (torch.backends.mkldnn.is_available() and ops._is_mkldnn_bf16_supported()):
            return False
        ones = torch.ones(32, 32, dtype=torch.bfloat16)
        product = ops._linear_pointwise(ones, ops._reorder_linear_weight(ones, _ROWS), None, "none", [], "")
        return bool((product == 32).all())
    except (AttributeError, RuntimeError, TypeError):
        return False
