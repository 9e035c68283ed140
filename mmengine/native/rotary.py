"""A table of cosines and sines for rotary positions. The table grows with the largest position."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_FIRST_LENGTH = 1024


class RotaryTable:
    """A table of the cosines and sines that `compute` returns, rounded to `dtype`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        axis: Tensor,
        compute: Callable[[Tensor], tuple[Tensor, Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """Build a table for `axis` and `compute`.

        `axis` [head_dim / 2]: for each frequency, its position axis (time, height or width). `compute`: maps
        int64 positions [rows, n] to cos and sin, [n, head_dim / 2] each. `dtype`: the dtype to which cos and
        sin are rounded.
        """
        self._rows, self._compute, self._dtype = _declare_functions(library), compute, dtype
        self._axis = axis.to(torch.int32).contiguous()
        self._num_axes = int(axis.max()) + 1
        self._grow(_FIRST_LENGTH)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [t, head_dim / 2], for int64 positions [3, t]. Raises ValueError if a
        position is negative.
        """
        num_tokens, half = positions.shape[1], len(self._axis)
        if positions.stride(1) != 1:
            positions = positions.contiguous()
        cos, sin = torch.empty((2, num_tokens, half)).unbind()
        while True:
            length = self._rows(
                positions.data_ptr(),
                positions.stride(0),
                num_tokens,
                self._axis.data_ptr(),
                self._num_axes,
                half,
                *(self._cos.data_ptr(), self._sin.data_ptr(), len(self._cos)),
                *(cos.data_ptr(), sin.data_ptr()),
            )
            if length < 0:
                raise ValueError("a rotary position is negative")
            if length <= len(self._cos):
                return cos, sin
            self._grow(1 << (length - 1).bit_length())

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, float32 [n, head_dim / 2], for the positions 0 to n - 1, n >= `length`.

        Each position applies to all axes.
        """
        if length > len(self._cos):
            self._grow(1 << (length - 1).bit_length())
        return self._cos, self._sin

    def _grow(self, length: int) -> None:
        table = self._compute(torch.arange(length).expand(self._num_axes, length))
        self._cos, self._sin = (one.to(self._dtype).float().contiguous() for one in table)


@cache
def _declare_functions(library: ctypes.CDLL) -> Callable[..., int]:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    rows = library.mm_rotary_rows
    tables = (pointer, pointer, long, pointer, pointer)
    rows.argtypes = (pointer, long, number, pointer, number, number, *tables)
    rows.restype = long
    return rows
