"""Quantises weights while they are read, some rows at a time. Values are rounded to the nearest code, without
calibration data.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from mmengine.checkpoint.tensors import Coding
from mmengine.native.linear import Codes

Quantize = Literal["none", "int8", "fp8"]
Activations = Literal["model", "int8"]
FP8_ROWS = 16  # How many rows share a scale (half a kernel panel).
CODINGS: dict[str, Coding] = {"int8": Coding("int8", 32), "fp8": Coding("fp8", 128)}
_MOST_FP8 = 448.0  # The largest e4m3 value.


def quantise(rows: torch.Tensor, coding: Coding) -> Codes | None:
    """Quantise floats [m, k] in groups along k. Returns None if a group's scale would not be finite."""
    return _QUANTISERS[coding.form](_groups(rows, coding.group), rows.shape[1])


def _groups(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Split rows [m, k] into groups along k, float32 [m, groups, size]. Zeros pad the last group."""
    return F.pad(rows.float(), (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _int8(groups: torch.Tensor, k: int) -> Codes | None:
    """Quantise symmetrically, with a float16 scale for each group, as Q8_0 in GGUF does."""
    scales = (groups.abs().amax(2) / 127).half().float()
    if not bool(scales.isfinite().all()):
        return None
    codes = (groups / _divisors(scales)[..., None]).round_().clamp_(-127, 127)
    return Codes(codes.to(torch.int8).flatten(1)[:, :k], scales)


def _fp8(groups: torch.Tensor, k: int) -> Codes | None:
    """Quantise to e4m3, with a float32 scale for each block (FP8_ROWS rows by one column group)."""
    size = groups.abs().amax(2)
    blocks = F.pad(size, (0, 0, 0, -len(size) % FP8_ROWS)).unflatten(0, (-1, FP8_ROWS)).amax(1)
    scales = (blocks / _MOST_FP8).repeat_interleave(FP8_ROWS, 0)[: len(size)]
    if not bool(scales.isfinite().all()):
        return None
    codes = (groups / _divisors(scales)[..., None]).to(torch.float8_e4m3fn)
    return Codes(codes.view(torch.uint8).flatten(1)[:, :k], scales)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    """Replace zero scales by 1, because a group with only zeros has the scale 0."""
    return torch.where(scales > 0, scales, 1)


_QUANTISERS: dict[str, Callable[[torch.Tensor, int], Codes | None]] = {"int8": _int8, "fp8": _fp8}
