"""Linear layers over packed weights, for Python: src/linear.h."""

import ctypes
import mmap
from functools import cache

import numpy as np
import torch
from torch import Tensor

_HUGE = 2**21
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Linear(ctypes.Structure):
    """mm_linear."""

    _fields_ = (
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


def packed_buffer(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], aligned to 64 bytes; from 2 MiB on in huge pages where the system gives them."""
    if num_bytes < _HUGE:
        buffer = np.empty(num_bytes + 64, dtype=np.uint8)
        start = -buffer.ctypes.data % 64
        return buffer[start : start + num_bytes]
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    start = -buffer.ctypes.data % _HUGE
    return buffer[start : start + num_bytes]


class PackedLinear:
    """y = x w^T + bias with w [n, k] packed once, float32 or bfloat16. Keeps no reference to `weight`.

    `gate_up`: w is gate's rows and then up's, and y = silu(x gate^T) * (x up^T), [m, n / 2].
    """

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gate_up: bool = False
    ) -> None:
        self._library = _declared(library)
        n, k = weight.shape
        self.dtype, self._gate_up = weight.dtype, gate_up
        self._width = n // 2 if gate_up else n
        dtype = _DTYPES[weight.dtype]
        weight = weight.contiguous()
        self._packed = packed_buffer(self._library.mm_linear_bytes(n, k, dtype))
        self._bias = None if bias is None else bias.float().contiguous()
        pack = self._library.mm_linear_pack_gate_up if gate_up else self._library.mm_linear_pack
        pack(weight.data_ptr(), self._width, k, dtype, self._packed.ctypes.data)
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.c = Linear(n, k, dtype, self._packed.ctypes.data, bias_address)
        self._address = ctypes.addressof(self.c)

    def __call__(self, x: Tensor, *, float32: bool = False) -> Tensor:
        """x [m, k] of the weight's dtype, rows contiguous, to [m, n]; float32 where asked for."""
        y = torch.empty((len(x), self._width), dtype=torch.float32 if float32 else self.dtype)
        if self._gate_up:
            self._library.mm_linear_gate_up(
                self._address, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), self._width
            )
        else:
            self._library.mm_linear_run(
                self._address, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), self._width, float32, None
            )
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of w by int64 [m], [m, k]; zeros for an index that is none of its rows."""
        out = torch.empty((len(indices), self.c.k), dtype=self.dtype)
        self._library.mm_linear_rows(self._address, indices.data_ptr(), len(indices), out.data_ptr())
        return out


@cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    arguments = {
        "bytes": (number, number, number),
        "pack": (pointer, number, number, number, pointer),
        "pack_gate_up": (pointer, number, number, number, pointer),
        "rows": (pointer, pointer, number, pointer),
        "run": (pointer, pointer, long, number, pointer, long, number, pointer),
        "gate_up": (pointer, pointer, long, number, pointer, long),
    }
    for name, types in arguments.items():
        function = getattr(library, f"mm_linear_{name}")
        function.argtypes, function.restype = types, None
    library.mm_linear_bytes.restype = long
    return library
