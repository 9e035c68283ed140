"""Triton kernels for a decoder layer's RMS norms and its SiLU gate. Not yet run on a GPU.

A program computes one row of a norm, or GATE_CHUNK values of a gate. The order of operations depends only on
the row's width, so a row has the same bits in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_CHUNK = 1024  # values per program


@triton.jit
def _norm_kernel(x, residual, weight, out, eps, WIDTH: tl.constexpr, LANES: tl.constexpr, ADDS: tl.constexpr):
    """Normalize a row of the contiguous tensors [t, WIDTH]. With ADDS, first add x to the residual."""
    row, lanes = tl.program_id(0).to(tl.int64) * WIDTH, tl.arange(0, LANES)
    inside = lanes < WIDTH
    values = tl.load(x + row + lanes, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row + lanes, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(residual.dtype.element_ty)
        tl.store(residual + row + lanes, stored, mask=inside)
        values = stored.to(tl.float32)  # the norm uses the rounded sum, as later layers do
    scale = tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    weights = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + lanes, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up, out, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < WIDTH
    source = gate_up + row * (2 * WIDTH) + place
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + place, gated.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x; see text_ops.TextOps."""
    x = x.contiguous()
    return _normed(x, x, weight, eps, adds=False)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` (contiguous) in place, and return the sum's norm.

    The sum is first rounded to its dtype; see text_ops.TextOps.
    """
    return _normed(x.contiguous(), residual, weight, eps, adds=True)


def _normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, adds: bool) -> Tensor:
    out, (num_rows, width) = torch.empty_like(x), x.shape
    lanes = triton.next_power_of_2(width)
    _norm_kernel[(num_rows,)](
        x, residual, weight, out, eps, WIDTH=width, LANES=lanes, ADDS=adds, num_warps=8 if lanes > 1024 else 4
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; see text_ops.TextOps."""
    gate_up = gate_up.contiguous()
    num_rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    grid = num_rows, triton.cdiv(width, GATE_CHUNK)
    _gate_kernel[grid](gate_up, out, WIDTH=width, CHUNK=GATE_CHUNK)
    return out
