"""Torch operations between a decoder layer's matmuls. They round values where transformers rounds them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]  # Arguments: x [t, n], weight [n], eps.


def rms_norm_of(dtype: torch.dtype, *, once: bool = False) -> RmsNorm:
    """Return the RMS norm for a dtype. In 16 bits, values are rounded before and after the multiplication by
    the weight. With `once`, values are rounded only after this multiplication, and the weight must be
    float32.
    """
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
    """Norm and rotate qk [t, heads, head_dim] into a new tensor.

    Each head is normed with its row in `weight` [heads, head_dim], unless `weight` is None. Then the first r
    values in each head are rotated by `cos` and `sin`. `cos` and `sin` [t, 1, r] come from `Rotary.rows`.
    `once`: as in `rms_norm_of`.
    """
    if weight is not None and once:
        qk = _rms_norm_once(qk, weight, eps)
    elif weight is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, eps) * weight
    rotated = cos.shape[-1]
    if rotated == qk.shape[-1]:
        return qk * cos + qk.roll(rotated // 2, -1) * sin
    turned, rest = qk[..., :rotated], qk[..., rotated:]
    return torch.cat((turned * cos + turned.roll(rotated // 2, -1) * sin, rest), -1)
