"""CPU kernels for the vision tower: attention within segments, gelu, and pixel normalisation."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from mmengine.native.dtypes import DTYPES
from mmengine.native.library import load

MAX_HEAD_DIM = 256  # the kernels' limit; torch computes larger heads


class _Segments(ctypes.Structure):
    """The C structure mm_segments in src/vision/vision.h."""

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
    """The kernels for a tower with `num_heads` heads and `head_dim` values per head. Tensors are on the CPU
    and have contiguous rows.
    """

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
        """Compute attention within segments for n patches, starting with patch `first`. Write the results to
        `out` [n, num_heads * head_dim].

        `qkv`: [p, 3 * num_heads * head_dim]: q, k and v before rotation. `starts`: int32, the first patch of
        each segment, followed by the patch count p. `cos`, `sin`: float32 [p, head_dim]; the first half of
        sin is negated. Neither `first` nor other segments change a bit in a patch's result. Raises
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
            raise MemoryError(f"not enough memory for attention over {len(qkv)} patches")

    def gelu(self, x: Tensor) -> None:
        """Apply gelu with the tanh approximation in place."""
        self._gelu(x.data_ptr(), x.numel(), self._code)

    def normalise(self, pixels: Tensor, out: Tensor) -> None:
        """Write (pixels / 255 - 0.5) / 0.5 to `out`, which has the same shape. Pixels are uint8. Each
        operation rounds to float32.
        """
        self._pixels(pixels.data_ptr(), pixels.numel(), self._code, out.data_ptr())


def vision_kernels(num_heads: int, head_dim: int, dtype: torch.dtype) -> VisionKernels | None:
    """Return the kernels for a tower. Returns None if the library is off, or does not support these heads or
    this dtype.
    """
    code = DTYPES.get(dtype)
    if code is None or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return None
    library = load()
    return None if library is None else VisionKernels(library, num_heads, head_dim, code)
