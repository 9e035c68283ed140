"""Unpacks GGUF's blocks of 256 values: K-quants and IQ4_XS.

Each block is divided into groups of 16 or 32 values. A value is `d * scale * code`; types with minimums
subtract `dmin * min`. Each block has its d and dmin (float16). Each group has its scale and min (small
integers). All products are exact in float32, so only the subtraction rounds
(https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
"""

from typing import NamedTuple

import numpy as np

VALUES = 256
# The value of each code in IQ4_NL and IQ4_XS.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_NIBBLES = np.array([[0], [4]], np.uint8)
_PAIRS = np.array([[0], [2], [4], [6]], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)[:, None]


class KBlocks(NamedTuple):
    """Unpacked blocks.

    `codes`: int8 [blocks, 256]. `scales`: int8 [blocks, groups]. `d`: float32 [blocks, 1]. `mins`: uint8
    [blocks, groups], and `dmin`: float32 [blocks, 1]; both are None for types without minimums.
    """

    codes: np.ndarray
    scales: np.ndarray
    d: np.ndarray
    mins: np.ndarray | None = None
    dmin: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """Return the values, float32 [blocks, 256], computed in ggml's order of operations."""
        out = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        out *= (self.d * self.scales)[..., None]
        if self.mins is not None and self.dmin is not None:
            out -= (self.dmin * self.mins)[..., None]
        return out.reshape(-1, VALUES)


def half(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def q2_k(blocks: np.ndarray) -> KBlocks:
    """Unpack 16 bytes of four-bit scales and minimums, 64 bytes of two-bit codes, d, and dmin."""
    shared, codes = blocks[:, :16], _two_bits(blocks[:, 16:80])
    return KBlocks(
        codes.view(np.int8), (shared & 15).view(np.int8), half(blocks, 80), shared >> 4, half(blocks, 82)
    )


def q3_k(blocks: np.ndarray) -> KBlocks:
    """Unpack 256 high bits, 64 bytes of low bits, 12 bytes of six-bit scales (stored plus 32), and d.

    A high bit of 0 subtracts 4 from the code.
    """
    high = blocks[:, None, :32] >> _BITS & 1
    codes = _two_bits(blocks[:, 32:96]).view(np.int8) - (4 - 4 * high.view(np.int8)).reshape(-1, VALUES)
    packed = blocks[:, 96:108]
    low = packed[:, None, :8] >> _NIBBLES & 15
    scales = low.reshape(-1, 16) | (packed[:, None, 8:] >> _PAIRS & 3).reshape(-1, 16) << 4
    return KBlocks(codes, scales.view(np.int8) - np.int8(32), half(blocks, 108))


def q4_k(blocks: np.ndarray) -> KBlocks:
    """Unpack d, dmin, 12 bytes of six-bit scales and minimums, and 128 bytes of four-bit codes."""
    scales, mins = _six_bits(blocks[:, 4:16])
    codes = blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLES & 15
    return KBlocks(codes.reshape(-1, VALUES).view(np.int8), scales, half(blocks, 0), mins, half(blocks, 2))


def q5_k(blocks: np.ndarray) -> KBlocks:
    """Unpack as `q4_k` does. The codes' 256 high bits precede their low bits."""
    scales, mins = _six_bits(blocks[:, 4:16])
    codes = (blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLES & 15).reshape(-1, 8, 32)
    codes |= (blocks[:, None, 16:48] >> _BITS & 1) << 4
    return KBlocks(codes.reshape(-1, VALUES).view(np.int8), scales, half(blocks, 0), mins, half(blocks, 2))


def q6_k(blocks: np.ndarray) -> KBlocks:
    """Unpack 128 bytes of low bits, 64 bytes of high bits, 16 signed scales, and d.

    The file stores each code plus 32.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> _NIBBLES & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIRS & 3
    codes = (low.reshape(high.shape) | high << 4).reshape(-1, VALUES).view(np.int8) - np.int8(32)
    return KBlocks(codes, blocks[:, 192:208].view(np.int8), half(blocks, 208))


def iq4_xs(blocks: np.ndarray) -> KBlocks:
    """Unpack d, eight six-bit scales (stored plus 32, high bits first), and 128 bytes of indices into
    IQ4_VALUES.
    """
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> _NIBBLES[:, 0] & 15).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    codes = (blocks[:, 8:].reshape(-1, 8, 1, 16) >> _NIBBLES & 15).reshape(-1, VALUES)
    return KBlocks(IQ4_VALUES[codes], scales, half(blocks, 0))


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack uint8 [blocks, 64] to codes [blocks, 256]. In each 32 bytes, the lowest two bits hold codes 0 to
    31, the next two bits codes 32 to 63, and so on.
    """
    return (packed.reshape(-1, 2, 1, 32) >> _PAIRS & 3).reshape(-1, VALUES)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack uint8 [blocks, 12] to eight scales, int8 [blocks, 8], and eight minimums, uint8 [blocks, 8]."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, low & 15 | first >> 6 << 4), axis=1)
    return scales.view(np.int8), np.concatenate((second & 63, low >> 4 | second >> 6 << 4), axis=1)
