"""Decodes GGUF's value types: plain floats, or blocks of 32 or 256 values with scales. Values are computed in
float32 by the same operations as in ggml's reference, so the bits are the same as in llama.cpp
(https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmengine.checkpoint.tensors import CodedRows, Coding


@dataclass(frozen=True, slots=True)
class StoredType:
    """A value type. A block stores `values` values in `bytes` bytes. `decode`: converts uint8 [blocks, bytes]
    to float32 [blocks, values]. `codes`: for a type with a `coding`, converts the same input to codes
    [blocks, values], and to scales and optional minimums [blocks, 1].
    """

    name: str
    values: int
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    coding: Coding | None = None
    codes: Callable[[np.ndarray], CodedRows] | None = None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return a tensor's size in bytes. The last dimension must be a multiple of `values`."""
        return math.prod(shape) // self.values * self.bytes


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return each block's float16 at byte `start`, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 16] to float32 [blocks, 32]: all bytes' low halves, then the high
    halves."""
    out = np.empty((len(packed), 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 signed bytes."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 nibbles with offset 8."""
    out = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _half(blocks, 0)
    return out


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale, a minimum and 32 nibbles. Product and sum are rounded separately."""
    out = _nibbles(blocks[:, 4:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)
    return out


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Decode 256 six-bit codes with offset 32, in two halves of 128 codes.

    A block stores the codes' low four bits (64 bytes for each half), their high two bits (32 bytes for each
    half), 16 signed bytes, and a float16. A signed byte times the float16, rounded to float32, is the scale
    of 16 codes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    out = (low.reshape(high.shape) | high << 4).astype(np.float32).reshape(-1, 16, 16)
    out -= 32
    out *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]
    return out.reshape(-1, 256)


def _q8_0_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_signed_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1_codes(blocks: np.ndarray) -> CodedRows:
    """Return the codes minus 8, and the minimums plus 8 * scale, which is rounded to float32."""
    scales = _half(blocks, 0)
    return CodedRows(_signed_nibbles(blocks[:, 4:]), scales, _half(blocks, 2) + 8 * scales)


def _signed_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 16] in `_nibbles`' order, and subtract 8: int8 [blocks, 32]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1).view(np.int8) - np.int8(8)


TYPES = {
    0: StoredType("F32", 1, 4, _f32),
    1: StoredType("F16", 1, 2, _f16),
    30: StoredType("BF16", 1, 2, _bf16),
    8: StoredType("Q8_0", 32, 34, _q8_0, Coding("int8", 32), _q8_0_codes),
    2: StoredType("Q4_0", 32, 18, _q4_0, Coding("int4", 32), _q4_0_codes),
    3: StoredType("Q4_1", 32, 20, _q4_1, Coding("int4", 32, mins=True), _q4_1_codes),
    14: StoredType("Q6_K", 256, 210, _q6_k),  # Most Q4_0 and Q4_1 files store the embedding or the head so.
}
OTHER_TYPES = (
    {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 15: "Q8_K"}
    | {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S"}
    | {23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"}
    | {35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
)  # ggml's numbers for unsupported types.
