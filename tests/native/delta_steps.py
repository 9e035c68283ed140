"""Runs a gated delta net step by step, with the CPU kernels or torch."""

import ctypes
from dataclasses import astuple, dataclass, field

import numpy as np
import torch

from mmengine.models.decoder.config import DeltaConfig
from mmengine.models.decoder.delta import DeltaMixer
from mmengine.models.states import StepStates
from mmengine.native.decoder_weights import DeltaWeights
from mmengine.native.delta import STATE_ARRAYS, DeltaSizes, DeltaSizesStruct, DeltaStruct, StateStep
from mmengine.native.dtypes import DTYPES

EPS = 1e-6


@dataclass
class Part:
    """A row's tokens in a step: first `stayed` accepted drafts from an earlier step, then the new tokens. The
    last `drafts` new tokens are drafts, and the new tokens before them are certain.

    `kept`: maps n to a slot, which gets the state n tokens after the row's state.
    """

    slot: int
    row: int
    projected: torch.Tensor  # [certain + drafts, width + values]
    numbers: torch.Tensor  # [certain + drafts, 2 * heads]
    stayed: int = 0
    drafts: int = 0
    kept: dict[int, int] = field(default_factory=dict)


class Net:
    """A gated delta net layer with random weights, and `slots` zero states. `room`: maximum number of drafts
    per row. `library`: the CPU kernels, or None for torch.
    """

    def __init__(self, sizes: DeltaSizes, dtype, library=None, *, slots=8, rows=8, room=4, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.sizes, self.dtype, self._library = sizes, dtype, library
        conv = torch.randn(sizes.taps, sizes.width, generator=random) * 0.6
        decay = -torch.linspace(-3, 1, sizes.num_heads).exp()
        dt_bias = torch.randn(sizes.num_heads, generator=random) * 0.5
        norm = 1 + 0.3 * torch.randn(sizes.value_dim, generator=random)
        conv, norm = conv.to(dtype), norm.to(dtype)
        self.conv = torch.zeros(slots, 1, sizes.taps - 1, sizes.width, dtype=dtype)
        self.recurrent = torch.zeros(slots, 1, sizes.num_heads, sizes.key_dim, sizes.value_dim)
        self.pending = torch.zeros(rows, 1, room, sizes.width + 2 * sizes.num_heads, dtype=dtype)
        if library is None:
            numbers = (sizes.num_key_heads, sizes.num_heads, sizes.key_dim, sizes.value_dim, sizes.taps)
            weights = DeltaWeights(lambda numbers: numbers, conv, decay, dt_bias, norm)
            config = DeltaConfig(frozenset((0,)), *numbers, tiled=sizes.tiled)
            self._mixer = DeltaMixer(config, weights, EPS, 0)
        else:
            self._weights = conv.float().contiguous(), decay, dt_bias, norm.float().contiguous()
            self._step = StateStep(sizes, dtype)

    def begin(self, slot, source=None):
        """Set a slot's state to zero, or to a copy of the state in slot `source`."""
        for each in (self.conv, self.recurrent):
            each[slot] = 0 if source is None else each[source]

    def step(self, parts):
        """Run a step, and return each part's outputs for the new tokens, [certain + drafts, values]."""
        starts = np.cumsum([0, *(len(part.projected) for part in parts)]).astype(np.int32)
        kept = [sorted(part.kept.items()) for part in parts]
        pairs = np.array([pair for each in kept for pair in each], np.int32).reshape(-1, 2)

        def each(numbers):
            return np.array(list(numbers), np.int32)

        states = StepStates(
            self.conv,
            self.recurrent,
            self.pending,
            slots=each(part.slot for part in parts),
            rows=each(part.row for part in parts),
            query_starts=starts,
            stayed=each(part.stayed for part in parts),
            certain=each(len(part.projected) - part.drafts for part in parts),
            kept_starts=np.cumsum([0, *map(len, kept)]).astype(np.int32),
            kept_after=np.ascontiguousarray(pairs[:, 0]),
            kept_slots=np.ascontiguousarray(pairs[:, 1]),
        )
        projected = torch.cat([part.projected for part in parts])
        numbers = torch.cat([part.numbers for part in parts])
        mix = self._in_torch if self._library is None else self._in_kernels
        return mix(projected, numbers, states).split(np.diff(starts).tolist())

    def _in_torch(self, projected, numbers, states):
        with torch.inference_mode():
            return self._mixer.mix(projected, numbers, states)

    def _in_kernels(self, projected, numbers, states):
        s = self.sizes
        arrays = {name: getattr(states, name) for name in STATE_ARRAYS}
        step = self._step.point((self.conv, self.recurrent, self.pending), arrays, states.stayed)
        step.c.ba = numbers.data_ptr()
        sizes = DeltaSizesStruct(*astuple(s))
        weights = DeltaStruct()
        weights.conv, weights.decay, weights.dt_bias, weights.norm = (w.data_ptr() for w in self._weights)
        mixed = torch.empty(len(projected), s.values, dtype=self.dtype)
        mix = self._library.mm_delta_mix
        mix.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)
        mix.argtypes += (ctypes.c_float, ctypes.c_void_p)
        mix.restype = None
        places = (ctypes.addressof(each) for each in (sizes, weights, step.c))
        mix(*places, 0, projected.data_ptr(), DTYPES[self.dtype], EPS, mixed.data_ptr())
        return mixed
