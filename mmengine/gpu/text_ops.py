"""Chooses kernels for a decoder layer's operations on a GPU. Also implements the operations in torch for any
device.

FlashInfer, or Triton if FlashInfer is missing, provides the norms and the gate. The rotation is a Triton
kernel, because no library combines M-RoPE, the norms of q and k, and the store into KV blocks. torch provides
the matmuls. torch also replaces a kernel that does not build, or that differs from torch on a small example.
With batch invariance, all operations are Triton kernels. This module has not yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.errors import ConfigError, in_one_line
from mmengine.gpu import DEVICE_TYPES

Cache = tuple[Tensor, Tensor]
Linear = Callable[[Tensor], Tensor]
Maker = Callable[[], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class TextOps:
    """A decoder layer's operations.

    linear(weight [n, k], bias [n] or None): returns a function from x [t, k] to x weight^T + bias.

    rms_norm(x [t, h], weight [h], eps): returns a new tensor.

    add_norm(x [t, h], residual [t, h], weight, eps): adds x to `residual` in place and returns the sum's RMS
    norm; may overwrite x.

    silu_mul(gate_up [t, 2 * i]): returns [t, i], silu(first half) * second half.

    norm_rotate(qkv [t, heads + 2 * kv_heads, d], weight [heads + kv_heads, d] or None, cos, sin, eps, heads,
    cache): norms each head of q and k if there is a weight, and rotates each head, in place. cos and sin are
    contiguous float32 [t, d / 2]. `cache`: None, or KV blocks [n, 2, block_size, kv_heads, d] and slots int64
    [t], where k and v are also stored.

    `by`: maps "matmuls", "norms", "gate" and "rotation" to the library that provides the operation.
    `batch_invariant`: whether the bits of a row's result depend on that row alone.
    """

    linear: Callable[[Tensor, Tensor | None], Linear]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    norm_rotate: Callable[[Tensor, Tensor | None, Tensor, Tensor, float, int, Cache | None], None]
    by: dict[str, str] = field(default_factory=dict)
    batch_invariant: bool = False


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: F.linear(x, weight, bias)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _norm_rotate(
    qkv: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    num_heads: int,
    cache: Cache | None,
) -> None:
    num_qk = (qkv.shape[1] + num_heads) // 2
    qk = qkv[:, :num_qk].float()
    if weight is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, eps) * weight.float()
    low, high = qk.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    qkv[:, :num_qk] = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(qkv.dtype)
    if cache is not None:
        blocks, slots = cache
        block, place = slots // blocks.shape[2], slots % blocks.shape[2]
        blocks[block, 0, place] = qkv[:, num_heads:num_qk].to(blocks.dtype)
        blocks[block, 1, place] = qkv[:, num_qk:].to(blocks.dtype)


def torch_ops() -> TextOps:
    """Return the operations implemented with torch, for any device."""
    names = dict.fromkeys(("matmuls", "norms", "gate", "rotation"), "torch")
    return TextOps(
        _linear,
        lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        _add_norm,
        _silu_mul,
        _norm_rotate,
        names,
    )


def text_ops(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> TextOps:
    """Return the fastest usable operations for `device` and `dtype`. The field `by` says why a library is not
    used.

    With `batch_invariant`, raises ConfigError if the Triton kernels do not run or are not batch invariant.
    """
    ops = torch_ops()
    if batch_invariant:
        return invariant_ops(ops, device, dtype)
    if device.type not in DEVICE_TYPES:
        return ops
    ops = choose(ops, "norms", (flashinfer_norms, our_norms), device, dtype)
    ops = choose(ops, "gate", (flashinfer_gate, our_gate), device, dtype)
    return choose(ops, "rotation", (our_rotation,), device, dtype)


def invariant_ops(ops: TextOps, device: torch.device, dtype: torch.dtype) -> TextOps:
    """Return `ops` with every operation replaced by a Triton kernel.

    Raises ConfigError if a kernel does not run, or if a row's bits change when other rows are in the batch.
    """
    ours = {"matmuls": our_matmuls, "norms": our_norms, "gate": our_gate, "rotation": our_rotation}
    for name, make in ours.items():
        ops = choose(ops, name, (make,), device, dtype)
    failed = [f"{name} by {who}" for name, who in ops.by.items() if who.startswith("torch")]
    if not failed and not _keeps_bits(ops, device, dtype):
        failed = ["a row's bits change with the other rows of the batch"]
    if failed:
        raise ConfigError(
            f"batch_invariant needs the Triton kernels on {device}: {', '.join(failed)}; turn it off, or "
            "use the CPU"
        )
    return replace(ops, batch_invariant=True)


def choose(
    ops: TextOps, name: str, makers: Sequence[Maker], device: torch.device, dtype: torch.dtype
) -> TextOps:
    """Return `ops` with the functions from the first maker whose functions run and agree with torch.

    A maker returns its library's name, and a dict from TextOps fields to functions. `by[name]` becomes the
    library's name, followed by the reasons why earlier makers were not used.
    """
    reasons: list[str] = []
    for make in makers:
        try:
            who, functions = make()
            better = replace(ops, **functions)
            gap = _largest_gap(better, device, dtype)
        except Exception as error:  # torch is used if a compiler, driver or version does not fit
            reasons.append(in_one_line(error, 200))
            continue
        if gap <= 8 * torch.finfo(dtype).eps:
            return replace(better, by=ops.by | {name: _because(who, reasons)})
        reasons.append(f"{who} is {gap:.1e} off torch")
    return replace(ops, by=ops.by | {name: _because("torch", reasons)})


def _because(who: str, reasons: list[str]) -> str:
    return f"{who} ({'; '.join(reasons)})" if reasons else who


def _largest_gap(ops: TextOps, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference between the results of `ops` and of torch on a small example.

    Differences are relative to the largest value in torch's result.
    """
    mine, wanted = _example(ops, device, dtype), _example(torch_ops(), device, dtype)
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, wanted, strict=True)]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _example(ops: TextOps, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return the results of `ops` on fixed inputs, converted to float32.

    The inputs are five tokens with four heads of 64 values: two heads for q, one for k and one for v.
    """
    ramp = torch.arange(5 * 256, device=device, dtype=torch.float32).view(5, 256)
    x, residual = ramp.sin().to(dtype), (ramp * 0.7).cos().to(dtype)
    weight = (1 + 0.1 * ramp[0].sin()).to(dtype)
    found = [ops.rms_norm(x.clone(), weight, 1e-6), ops.silu_mul(x.clone())]
    found.append(ops.linear(ramp.add(1).sin().view(20, 64).to(dtype), weight[:20])(x.view(20, 64)))
    found += [ops.add_norm(x.clone(), residual, weight, 1e-6), residual]
    qkv, angles = x.clone().view(5, 4, 64), ramp[:, :32] * 0.01
    blocks = torch.zeros(2, 2, 4, 1, 64, device=device, dtype=dtype)
    slots = torch.tensor([4, 5, 6, 7, 2], device=device)
    ops.norm_rotate(qkv, weight[:192].view(3, 64), angles.cos(), angles.sin(), 1e-6, 2, (blocks, slots))
    rotated = x.clone().view(5, 4, 64)
    ops.norm_rotate(rotated, None, angles.cos(), angles.sin(), 1e-6, 2, None)
    return [each.float() for each in (*found, qkv, blocks, rotated)]


def _keeps_bits(ops: TextOps, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a row's bits are the same in a batch with 67 rows and in smaller batches."""
    ramp = torch.arange(67 * 128, device=device, dtype=torch.float32).view(67, 128)
    x, weight = (ramp * ramp).sin().to(dtype), (ramp * 0.7).cos().to(dtype)
    linear = ops.linear(weight, None)

    def computed(rows: slice) -> list[Tensor]:
        residual = x[rows].clone()
        normed = ops.add_norm(x[rows] * 0.3, residual, weight[0], 1e-6)
        return [
            linear(x[rows]),
            ops.silu_mul(x[rows]),
            ops.rms_norm(x[rows], weight[0], 1e-6),
            normed,
            residual,
        ]

    whole = computed(slice(None))
    for rows in (slice(0, 1), slice(3, 5), slice(40, 67)):
        if not all(torch.equal(one[rows], part) for one, part in zip(whole, computed(rows), strict=True)):
            return False
    return True


def flashinfer_norms() -> tuple[str, dict[str, Any]]:
    import flashinfer

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    return f"flashinfer {flashinfer.__version__}", {"rms_norm": flashinfer.rmsnorm, "add_norm": add_norm}


def flashinfer_gate() -> tuple[str, dict[str, Any]]:
    import flashinfer

    return f"flashinfer {flashinfer.__version__}", {"silu_mul": flashinfer.silu_and_mul}


def our_matmuls() -> tuple[str, dict[str, Any]]:
    import triton

    from mmengine.gpu.linear_kernels import fixed_linear

    return f"triton {triton.__version__}", {"linear": fixed_linear}


def our_norms() -> tuple[str, dict[str, Any]]:
    import triton

    from mmengine.gpu.norm_kernels import add_norm, rms_norm

    return f"triton {triton.__version__}", {"rms_norm": rms_norm, "add_norm": add_norm}


def our_gate() -> tuple[str, dict[str, Any]]:
    import triton

    from mmengine.gpu.norm_kernels import silu_mul

    return f"triton {triton.__version__}", {"silu_mul": silu_mul}


def our_rotation() -> tuple[str, dict[str, Any]]:
    import triton

    from mmengine.gpu.text_kernels import norm_rotate

    return f"triton {triton.__version__}", {"norm_rotate": norm_rotate}
