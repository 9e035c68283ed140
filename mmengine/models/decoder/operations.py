"""What layers of a decoder do in torch between their matmuls, rounded where transformers rounds."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]  # x [t, n], weight [n], eps


def rms_norm_of(dtype: torch.dtype) -> RmsNorm:
    """Below float32 what is normed is rounded before the weight, too."""
    return _rms_norm if dtype == torch.float32 else _rms_norm_rounded


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, None, eps) * weight


def norm_and_rotate(qk: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """qk [t, heads, head_dim], each head by its row of `weight` [heads, head_dim] (None: not normed), then
    rotated by cos and sin of `Rotary.rows`. A new tensor."""
    head_dim = qk.shape[-1]
    if weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps) * weight
    return qk * cos + qk.roll(head_dim // 2, -1) * sin
