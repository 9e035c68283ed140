"""Computes the cosines and sines that rotate q and k. Frequencies may be scaled, and a token may have three
positions.
"""

import math

import torch
from torch import Tensor

from mmengine.checkpoint.rope import RopeConfig


class Rotary:
    """Computes a model's cosines and sines. `axis`: int64 [head_dim / 2], the row of positions (time, height
    or width) that each frequency uses.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.axis = axes(rope, head_dim).to(device)

    def rows(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [t, 1, head_dim] each, for positions int64 [3, t]. Both are computed in float32
        and cast to `dtype`. The first half of sin is negated, so the rotation is x * cos + roll(x, head_dim /
        2) * sin.
        """
        cos, sin = (half.to(dtype) for half in self.halves(positions))
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, contiguous float32 [t, head_dim / 2] each, for positions int64 [3, t]."""
        angles = positions.float().index_select(0, self.axis).t().contiguous() * self._inv_freq
        return angles.cos(), angles.sin()


def axes(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return, for each frequency, the row of positions that it uses, int64 [head_dim / 2].

    Interleaved sections: frequency i uses the height if i % 3 == 1 and i is below three times the height's
    section. It uses the width if i % 3 == 2 and i is below three times the width's section. Otherwise it uses
    the time. Without interleaving, each section's frequencies are consecutive. Without sections, all
    frequencies use row 0.
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
    """Return the frequencies, float32 [head_dim / 2], with the same bits as `modeling_rope_utils` in
    transformers. The kind "linear" divides all frequencies by the factor. The kind "llama3" depends on the
    wavelength. It divides frequencies with wavelengths above `original_positions / low_freq_factor`, keeps
    frequencies with wavelengths below `original_positions / high_freq_factor`, and interpolates between these
    limits.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    divided = plain / rope.factor
    if rope.kind == "linear":
        return divided
    low, high = rope.low_freq_factor, rope.high_freq_factor
    waves = 2 * math.pi / plain  # The wavelengths in tokens.
    ease = (rope.original_positions / waves - low) / (high - low)
    eased = (1 - ease) * plain / rope.factor + ease * plain
    scaled = torch.where(waves > rope.original_positions / low, divided, eased)
    return torch.where(waves < rope.original_positions / high, plain, scaled)
