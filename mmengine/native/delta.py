"""Describes gated delta nets to the CPU kernels, with the C structures of src/layers/delta.h."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmengine.native.linear import Linear

MAX_KEY_DIM = 256  # the CPU kernels' limit; torch computes nets with larger keys
MAX_TAPS = 16  # the kernels' limit on a convolution's kernel size
_NUMBER, _ADDRESS, _STRIDE = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
_ARRAYS = (
    *("query_starts", "work_starts", "slots", "rows", "certain"),
    *("kept_starts", "kept_after", "kept_slots"),
)
_TENSORS = (("conv", "slot"), ("recurrent", "slot"), ("pending", "row"))  # (tensor, its first axis)
# the arrays in StepStates (models/states.py)
STATE_ARRAYS = tuple(name for name in _ARRAYS if name != "work_starts")


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """A gated delta net's dimensions. `num_key_heads`: heads of q and of k. `num_heads`: heads of v, a
    multiple of `num_key_heads`. `tiled`: whether value head h uses key head h % `num_key_heads`.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def width(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def fits(self) -> bool:
        """Whether the kernels support these dimensions."""
        return self.key_dim <= MAX_KEY_DIM and self.value_dim % 16 == 0 and 2 <= self.taps <= MAX_TAPS


class DeltaSizesStruct(ctypes.Structure):
    """The C structure mm_delta_sizes."""

    _fields_ = tuple(
        (name, _NUMBER) for name in ("num_key_heads", "num_heads", "key_dim", "value_dim", "taps", "tiled")
    )


class DeltaStruct(ctypes.Structure):
    """The C structure mm_delta."""

    _fields_ = (("ba", Linear), *((name, _ADDRESS) for name in ("conv", "decay", "dt_bias", "norm")))


class StateStepStruct(ctypes.Structure):
    """The C structure mm_state_step."""

    _fields_ = (
        *((name, _NUMBER) for name in ("num_rows", "num_work")),
        *((name, _ADDRESS) for name in _ARRAYS),
        *((name, _ADDRESS) for name, _ in _TENSORS),
        *((f"{name}_{axis}", _STRIDE) for name, what in _TENSORS for axis in (what, "layer")),
        *((name, _ADDRESS) for name in ("ba", "acts", "gates")),
    )


class StateStep:
    """The recurrent states of one step as a C structure, `c`. Valid until the next call of `point`."""

    def __init__(self, sizes: DeltaSizes, dtype: torch.dtype) -> None:
        self._sizes, self._dtype = sizes, dtype
        self.c = StateStepStruct()
        self._tokens, self._work = torch.empty(0, dtype=dtype), torch.empty(0)
        self._held: tuple[object, ...] = ()  # owns the memory that `c` points to

    def point(
        self, tensors: tuple[Tensor, Tensor, Tensor], arrays: dict[str, np.ndarray], stayed: np.ndarray
    ) -> "StateStep":
        """Fill `c` for a step and return self.

        `tensors`: the states conv, recurrent and pending. `arrays`: the STATE_ARRAYS of a StepStates, int32.
        `stayed`: int32 [rows], each row's number of accepted drafts, which this step adds to the row's state.
        """
        c, sizes = self.c, self._sizes
        starts = arrays["query_starts"]
        work = starts.copy()
        work[1:] += np.cumsum(stayed, dtype=np.int32)
        arrays = {**arrays, "work_starts": work}
        c.num_rows, c.num_work = len(stayed), int(work[-1])
        for name in _ARRAYS:
            setattr(c, name, arrays[name].ctypes.data)
        for (name, what), tensor in zip(_TENSORS, tensors, strict=True):
            setattr(c, name, tensor.data_ptr())
            setattr(c, f"{name}_{what}", tensor.stride(0))
            setattr(c, f"{name}_layer", tensor.stride(1))
        numbers, width = 2 * sizes.num_heads, sizes.width
        if len(self._tokens) < int(starts[-1]) * numbers:
            self._tokens = torch.empty(2 * int(starts[-1]) * numbers, dtype=self._dtype)
        if len(self._work) < c.num_work * (width + numbers):
            self._work = torch.empty(2 * c.num_work * (width + numbers))
        c.ba, c.acts = self._tokens.data_ptr(), self._work.data_ptr()
        c.gates = c.acts + 4 * c.num_work * width
        self._held = tensors, arrays
        return self
