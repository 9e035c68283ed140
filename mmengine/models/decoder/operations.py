"""What layers of a decoder do in torch between their matmuls, rounded where transformers rounds."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]  # x [t, n], weight [n], eps


def rms_norm_of(dtype: torch.dtype, *, once: bool = False) -> RmsNorm:
    """Below float32 what is normed is rounded before the weight, too, but where it is rounded `once`: weights
    are float32 then."""
    if dtype == torch.float32:
        return _rms_norm
    return _rms_norm_once if once else _rms_norm_rounded


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rms_norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, None, eps) * weight


def _rms_norm_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight).to(x.dtype)


def norm_and_rotate(
    qk: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, *, once: bool = False
) -> Tensor:
    """qk [t, heads, head_dim], each head by its row of `weight` [heads, head_dim] (None: not normed), then as
    many of its values as cos and sin of `Rotary.rows` have rotated by these. `once`: as of `rms_norm_of`. A
    new tensor."""
    if weight is not None and once:
        qk = _rms_norm_once(qk, weight, eps)
    elif weight is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, eps) * weight
    rotated = cos.shape[-1]
    if rotated == qk.shape[-1]:
        return qk * cos + qk.roll(rotated // 2, -1) * sin
    turned, rest = qk[..., :rotated], qk[..., rotated:]
    return torch.cat((turned * cos + turned.roll(rotated // 2, -1) * sin, rest), -1)
