"""Decodes the value types of GGUF: plain floats, or blocks of 32 or 256 values with scales.

Values are computed in float32 with the same operations as in ggml's reference, so that the bits equal
llama.cpp's (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmengine.checkpoint.gguf.k_blocks import (
    IQ4_VALUES,
    KBlocks,
    half,
    iq4_xs,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
)
from mmengine.checkpoint.tensors import Blocks, CodedRows, Coding

_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True)
class StoredType:
    """A value type. A block stores `values` values in `bytes` bytes.

    `decode`: converts uint8 [blocks, bytes] to float32 [blocks, values]. `codes`, for a type with a `coding`:
    converts uint8 [blocks, bytes] to codes [blocks, values], and to scales and optional minimums [blocks, 1].
    """

    name: str
    values: int
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]
    coding: Coding | None = None
    codes: Callable[[np.ndarray], CodedRows] | None = None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the size of a tensor in bytes. The last dimension must be a multiple of `values`."""
        return math.prod(shape) // self.values * self.bytes


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 16] to float32 [blocks, 32]: first the low halves of all bytes, then the high
    halves.
    """
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
    return half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 nibbles with offset 8."""
    out = _nibbles(blocks[:, 2:])
    out -= 8
    out *= half(blocks, 0)
    return out


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale, a minimum and 32 nibbles. Product and sum are rounded separately."""
    out = _nibbles(blocks[:, 4:])
    out *= half(blocks, 0)
    out += half(blocks, 2)
    return out


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Unpack high bits, uint8 [blocks, 4], and low bits, uint8 [blocks, 16], to codes, int8 [blocks, 32]."""
    codes = np.concatenate((low & 15, low >> 4), axis=1)
    return (codes | np.unpackbits(high, axis=1, bitorder="little") << 4).view(np.int8)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 five-bit codes with offset 16."""
    codes, scales = _q5_0_codes(blocks)[:2]
    return scales * codes.astype(np.float32)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale, a minimum and 32 five-bit codes. Product and sum are rounded separately."""
    codes, scales, mins = _q5_1_codes(blocks)
    return scales * codes.astype(np.float32) + mins


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """Decode a scale and 32 nibbles, which stand for the integers in IQ4_VALUES."""
    codes, scales = _iq4_nl_codes(blocks)[:2]
    return scales * codes.astype(np.float32)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    """Decode a power of two and 32 e2m1 numbers. _MXFP4_VALUES contains doubled numbers, so the power of two
    is halved.
    """
    powers = blocks[:, :1].astype(np.uint32)
    bits = np.where(powers < 2, np.uint32(0x200000) << powers, (powers - 1) << 23)
    return bits.view(np.float32) * _MXFP4_VALUES[_codes(blocks[:, 1:])].astype(np.float32)


def _codes(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 16] to uint8 [blocks, 32], in the order of `_nibbles`."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _q8_0_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(blocks[:, 2:].view(np.int8), half(blocks, 0))


def _q4_0_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_signed_nibbles(blocks[:, 2:]), half(blocks, 0))


def _q4_1_codes(blocks: np.ndarray) -> CodedRows:
    """Return the codes minus 8, which fit into int4. To compensate, the float32 minimums gain 8 * scale."""
    scales = half(blocks, 0)
    return CodedRows(_signed_nibbles(blocks[:, 4:]), scales, half(blocks, 2) + 8 * scales)


def _q5_0_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.int8(16), half(blocks, 0))


def _q5_1_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(_five_bits(blocks[:, 4:8], blocks[:, 8:]), half(blocks, 0), half(blocks, 2))


def _iq4_nl_codes(blocks: np.ndarray) -> CodedRows:
    return CodedRows(IQ4_VALUES[_codes(blocks[:, 2:])], half(blocks, 0))


def _k_values(unpack: Callable[[np.ndarray], KBlocks]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: unpack(blocks).values()


def _signed_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 16] in the order of `_nibbles`, and subtract 8: int8 [blocks, 32]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1).view(np.int8) - np.int8(8)


TYPES = {
    0: StoredType("F32", 1, 4, _f32),
    1: StoredType("F16", 1, 2, _f16),
    30: StoredType("BF16", 1, 2, _bf16),
    8: StoredType("Q8_0", 32, 34, _q8_0, Coding("int8", 32), _q8_0_codes),
    2: StoredType("Q4_0", 32, 18, _q4_0, Coding("int4", 32), _q4_0_codes),
    3: StoredType("Q4_1", 32, 20, _q4_1, Coding("int4", 32, mins=True), _q4_1_codes),
    6: StoredType("Q5_0", 32, 22, _q5_0, Coding("int8", 32), _q5_0_codes),
    7: StoredType("Q5_1", 32, 24, _q5_1, Coding("int8", 32, mins=True), _q5_1_codes),
    10: StoredType("Q2_K", 256, 84, _k_values(q2_k)),
    11: StoredType("Q3_K", 256, 110, _k_values(q3_k)),
    12: StoredType("Q4_K", 256, 144, _k_values(q4_k)),
    13: StoredType("Q5_K", 256, 176, _k_values(q5_k)),
    14: StoredType("Q6_K", 256, 210, _k_values(q6_k)),
    20: StoredType("IQ4_NL", 32, 18, _iq4_nl, Coding("int8", 32), _iq4_nl_codes),
    23: StoredType("IQ4_XS", 256, 136, _k_values(iq4_xs)),
    39: StoredType("MXFP4", 32, 17, _mxfp4),
}
# Types that kernels multiply without conversion -> byte offsets of the float16 numbers in a block.
_HALVES: dict[int, tuple[int, ...]] = dict.fromkeys((2, 6, 8, 20, 23), (0,)) | dict.fromkeys(
    (3, 7, 12, 13), (0, 2)
)
_HALVES |= {10: (80, 82), 11: (108,), 14: (208,), 39: ()}
BLOCKS = {TYPES[number].name: Blocks(number, TYPES[number].name, at) for number, at in _HALVES.items()}
OTHER_TYPES = (
    {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S"}
    | {22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"}
    | {35: "TQ2_0", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"}
)  # ggml's numbers for unsupported types.
