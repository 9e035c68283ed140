"""The vision tower's kernels: attention within segments, gelu, and pixels to numbers."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from mmengine.native.dtypes import DTYPES
from mmengine.native.library import load

MAX_HEAD_DIM = 256  # of what the kernels compute; torch computes beyond it


class _Segments(ctypes.Structure):
    """mm_segments of src/vision/vision.h."""

    _fields_ = (
        ("num_segments", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("starts", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    )


class VisionKernels:
    """For one tower: `num_heads` of `head_dim`, weights and hidden states of `dtype`. Tensors lie on the
    CPU, and their rows are contiguous."""

    def __init__(self, library: ctypes.CDLL, num_heads: int, head_dim: int, dtype_code: int) -> None:
        self._num_heads, self._head_dim, self._code = num_heads, head_dim, dtype_code
        self._attention, self._gelu, self._pixels = (
            library.mm_vision_attention,
            library.mm_vision_gelu,
            library.mm_vision_pixels,
        )
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._attention.argtypes = (ctypes.POINTER(_Segments), pointer, size, size, size, pointer, size)
        self._gelu.argtypes = (pointer, size, ctypes.c_int32)
        self._pixels.argtypes = (pointer, size, ctypes.c_int32, pointer)
        self._gelu.restype = self._pixels.restype = None

    def attend(
        self, qkv: Tensor, starts: np.ndarray, cos: Tensor, sin: Tensor, out: Tensor, first: int = 0
    ) -> None:
        """Each patch attends to its own segment; out [n, num_heads * head_dim] of the n patches from `first`
        on.

        qkv: [p, 3 * num_heads * head_dim], q, k and v not yet rotated. starts: int32, the first patch of
        each segment, then p. cos, sin: float32 [p, head_dim], the first half of sin negated. A patch's result
        is the same to the bit whatever the other segments are, and whatever is asked for with it. Raises
        MemoryError.
        """
        segments = _Segments(
            len(starts) - 1,
            self._num_heads,
            self._head_dim,
            self._code,
            starts.ctypes.data,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        failed = self._attention(
            ctypes.byref(segments),
            qkv.data_ptr(),
            qkv.stride(0),
            first,
            first + len(out),
            out.data_ptr(),
            out.stride(0),
        )
        if failed:
            raise MemoryError(f"no memory to attend over {len(qkv)} patches")

    def gelu(self, x: Tensor) -> None:
        """gelu in its tanh form, in place."""
        self._gelu(x.data_ptr(), x.numel(), self._code)

    def normalise(self, pixels: Tensor, out: Tensor) -> None:
        """uint8 to (x / 255 - 0.5) / 0.5, each operation in float32, into `out` of the same shape."""
        self._pixels(pixels.data_ptr(), pixels.numel(), self._code, out.data_ptr())


def vision_kernels(num_heads: int, head_dim: int, dtype: torch.dtype) -> VisionKernels | None:
    """None where the library is not there, or has nothing for such heads or such a torch dtype."""
    code = DTYPES.get(dtype)
    if code is None or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return None
    library = load()
    return None if library is None else VisionKernels(library, num_heads, head_dim, code)
