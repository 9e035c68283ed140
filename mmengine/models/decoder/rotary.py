"""Cosines and sines for rotating q and k: plain, scaled, and with three positions per token."""

import math

import torch
from torch import Tensor

from mmengine.checkpoint.rope import RopeConfig


class Rotary:
    """Rotation tables for a model. `axis`, int64 [head_dim / 2]: the row of positions that each frequency
    follows.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.axis = axes(rope, head_dim).to(device)

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin for positions int64 [3, t], [t, 1, head_dim] each, computed in float32. The
        first half of sin is negated, so x * cos + roll(x, head_dim / 2) * sin is the rotation.
        """
        cos, sin = (half.to(dtype) for half in self.halves(positions))
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, contiguous float32 [t, head_dim / 2] each."""
        angles = positions.float().index_select(0, self.axis).t().contiguous() * self._inv_freq
        return angles.cos(), angles.sin()


def axes(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the position row for each frequency, int64 [head_dim / 2].

    Interleaved: frequency i follows the height where i % 3 == 1 and the width where i % 3 == 2, each below
    three times its section, otherwise the time. Not interleaved: the sections are consecutive. Without
    sections all frequencies follow row 0.
    """
    axis = torch.zeros(head_dim // 2, dtype=torch.long)
    if rope.sections is None:
        return axis
    if rope.interleaved:
        for which in (1, 2):
            axis[which : 3 * rope.sections[which] : 3] = which
        return axis
    return torch.arange(3).repeat_interleave(torch.tensor(rope.sections))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return float32 [head_dim / 2], bit for bit transformers' values (`modeling_rope_utils`). "linear"
    divides all frequencies by the factor. "llama3" divides frequencies whose wave is longer than the original
    training context, with a smooth transition.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    divided = plain / rope.factor
    if rope.kind == "linear":
        return divided
    low, high = rope.low_freq_factor, rope.high_freq_factor
    waves = 2 * math.pi / plain  # Wave lengths in tokens.
    ease = (rope.original_positions / waves - low) / (high - low)
    eased = (1 - ease) * plain / rope.factor + ease * plain
    scaled = torch.where(waves > rope.original_positions / low, divided, eased)
    return torch.where(waves < rope.original_positions / high, plain, scaled)
