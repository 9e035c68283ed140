"""A vision tower's rotary embedding and attention on a GPU. A single call computes the attention for all
frames in a step.

Attention is torch's varlen attention (flash attention, only for 16-bit dtypes), and the rotation is a Triton
kernel. Attention and rotation are used only if they reproduce torch's frame-by-frame results on a small
example. This code has not yet run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.gpu import DEVICE_TYPES


@dataclass(frozen=True, slots=True)
class VisionOps:
    """A vision tower's operations.

    rotate(qk [p, heads, d], cos, sin): rotates qk in place. cos and sin are float32 [p, d / 2] with equal row
    strides.

    attend(q, k, v, starts, longest): returns attention over q, k and v, all [p, heads, d]. A patch attends to
    all patches of its own frame. Frame i consists of patches starts[i] to starts[i + 1] (`starts`: int32
    [frames + 1], on the device). A frame may be empty and has at most `longest` patches.
    """

    rotate: Callable[[Tensor, Tensor, Tensor], None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def rotate(qk: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate qk in place with torch; see VisionOps."""
    low, high = qk.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    qk.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))


def attend_by_frames(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Attend frame by frame with torch, as a reference. Reading the frame lengths waits for the device."""
    sizes = [size for size in starts.diff().tolist() if size]
    frames = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*frame) for frame in frames], 1).transpose(0, 1)


def attend_at_once(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Attend to all frames in a single call of torch's varlen (flash) attention.

    Raises AttributeError or ImportError if this version of torch has no varlen attention.
    """
    from torch.nn.attention.varlen import varlen_attn

    mixed = varlen_attn(q, k, v, starts, starts, longest, longest)
    assert isinstance(mixed, Tensor)  # a tuple only if more results are requested
    return mixed


def vision_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> VisionOps | None:
    """Return the operations for `device`, or None if the device, dtype or torch does not support them.

    Without these operations, the vision tower calls attention once per frame length.
    """
    if device.type not in DEVICE_TYPES or dtype not in (torch.bfloat16, torch.float16):
        return None
    if not gives_known_numbers(VisionOps(rotate, attend_at_once), device, dtype, head_dim):
        return None
    try:
        from mmengine.gpu.text_kernels import rotate as our_rotate
    except ImportError:
        return VisionOps(rotate, attend_at_once)
    ours = VisionOps(our_rotate, attend_at_once)
    return ours if gives_known_numbers(ours, device, dtype, head_dim) else VisionOps(rotate, attend_at_once)


def gives_known_numbers(ops: VisionOps, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `ops` run, and agree with torch's frame-by-frame results on a small example."""
    ramp = torch.arange(13 * 6 * head_dim, device=device, dtype=torch.float32).view(13, 6, head_dim)
    angles = ramp[:, 0] * 0.01
    half, starts = head_dim // 2, torch.tensor([0, 4, 5, 13, 13], dtype=torch.int32, device=device)
    found = []
    try:
        for each in (ops, VisionOps(rotate, attend_by_frames)):
            qkv = (ramp * 0.7).sin().to(dtype)
            each.rotate(qkv[:, :4], angles.cos()[:, :half], angles.sin()[:, half:])
            q, k, v = qkv.split(2, 1)
            found.append((qkv.float(), each.attend(q, k, v, starts, 13).float()))
    except Exception:  # torch is used if a compiler, driver or version does not fit
        return False
    gaps = [float((mine - wanted).abs().max()) for mine, wanted in zip(*found, strict=True)]
    return all(gap <= 8 * torch.finfo(dtype).eps for gap in gaps)
