"""Computes attention in the vision tower. Patches from many frames are packed together, and a patch attends
only to patches in its own frame."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.gpu.vision_ops import VisionOps
from mmengine.native.vision import VisionKernels


class Rotation:
    """The frames in a pack, and the tables for the rotary embedding. `cos`, `sin`: float32 [patches,
    head_dim]; the first half of sin is negated. `lengths`: each frame's patch count. `starts`: each frame's
    first patch, then the total patch count, int32 [frames + 1].
    """

    __slots__ = ("cos", "lengths", "sin", "starts")

    def __init__(self, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> None:
        self.cos, self.sin, self.lengths = cos, sin, lengths
        self.starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=self.starts[1:])

    def there(self) -> "RotationThere":
        return RotationThere(
            self.cos, self.sin, upload(torch.from_numpy(self.starts), self.cos.device), max(self.lengths)
        )


class RotationThere(NamedTuple):
    """A Rotation on the device. `starts`: int32 [frames + 1]; a frame may be empty. `longest`: an upper bound
    for a frame's patch count.
    """

    cos: Tensor
    sin: Tensor
    starts: Tensor
    longest: int


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, without waiting for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_into(tensor: Tensor, target: Tensor) -> None:
    """Write a host tensor to the beginning of `target`, without waiting for the device."""
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    target[: len(tensor)].copy_(tensor, non_blocking=True)


def attend_native(kernels: VisionKernels, qkv: Tensor, pack: Rotation, out: Tensor | None = None) -> Tensor:
    """Return the result of `attend_torch`, computed by a CPU kernel. The frames' order does not affect the
    speed. Writes to `out` if given.
    """
    if out is None:
        out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    kernels.attend(qkv, pack.starts, pack.cos, pack.sin, out)
    return out


def attend_packed(ops: VisionOps, qkv: Tensor, num_heads: int, pack: RotationThere) -> Tensor:
    """Return the result of `attend_torch`, computed by GPU kernels. The frames' order does not affect the
    speed. Overwrites `qkv`.
    """
    half = pack.cos.shape[1] // 2
    qkv = qkv.view(len(qkv), 3 * num_heads, -1)
    ops.rotate(qkv[:, : 2 * num_heads], pack.cos[:, :half], pack.sin[:, half:])
    q, k, v = qkv.split(num_heads, 1)
    mixed = ops.attend(q, k, v, pack.starts, pack.longest)
    return mixed.reshape(len(qkv), -1)


def attend_torch(qkv: Tensor, num_heads: int, pack: Rotation) -> Tensor:
    """Return the attention output [p, num_heads * head_dim]. `qkv`: [p, 3 * num_heads * head_dim], not
    rotated yet.

    Adjacent frames with equal lengths are computed together, so callers should put such frames side by side.
    """
    head_dim = qkv.shape[1] // (3 * num_heads)
    qkv = qkv.view(len(qkv), 3 * num_heads, head_dim)
    qk = _turned(qkv[:, : 2 * num_heads], pack.cos, pack.sin)
    mixed = []
    start = 0
    for count, length in equal_neighbours(pack.lengths):
        stop = start + count * length
        q, k, v = (
            x[start:stop].view(count, length, num_heads, head_dim).transpose(1, 2)
            for x in (qk[:, :num_heads], qk[:, num_heads:], qkv[:, 2 * num_heads :])
        )
        out = F.scaled_dot_product_attention(q, k, v)
        mixed.append(out.transpose(1, 2).reshape(count * length, num_heads * head_dim))
        start = stop
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _turned(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q and k [p, heads, head_dim] by the patches' angles, float32 [p, head_dim]."""
    wide = qk.float()
    return (wide * cos.unsqueeze(1) + wide.roll(wide.shape[2] // 2, -1) * sin.unsqueeze(1)).to(qk.dtype)


def rotated(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return qkv [p, 3 * num_heads * head_dim], with q and k rotated."""
    heads = qkv.view(len(qkv), 3 * num_heads, -1)
    qk = _turned(heads[:, : 2 * num_heads], cos, sin)
    return torch.cat((qk, heads[:, 2 * num_heads :]), 1).view(qkv.shape)


def attend_turned(qkv: Tensor, num_heads: int, pack: Rotation, rows: slice) -> Tensor:
    """Return the result of `attend_torch` for the patches `rows` only. `qkv` contains all patches, with q and
    k already rotated.
    """
    q, k, v = qkv.view(len(qkv), 3, num_heads, -1).permute(1, 2, 0, 3)
    mixed = []
    for begin, end in zip(pack.starts[:-1].tolist(), pack.starts[1:].tolist(), strict=True):
        first, last = max(begin, rows.start), min(end, rows.stop)
        if first < last:
            own = slice(begin, end)
            out = F.scaled_dot_product_attention(q[None, :, first:last], k[None, :, own], v[None, :, own])
            mixed.append(out[0].transpose(0, 1).reshape(last - first, -1))
    return torch.cat(mixed)


def equal_neighbours(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, length) for each run of adjacent frames with equal lengths."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        count = runs.pop()[0] if runs and runs[-1][1] == length else 0
        runs.append((count + 1, length))
    return runs
