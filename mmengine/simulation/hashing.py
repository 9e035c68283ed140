"""Computes the CRC-32s of many short texts together. Each text is a row's prefix followed by a decimal
number.

The fake model derives its tokens from CRC-32s of texts like "request:1234". CRC-32 processes one byte after
another, so `prefix_state` is computed once per prefix, and numpy processes the digits of all numbers
together.
"""

import zlib

import numpy as np

_ALL = 0xFFFFFFFF
# The CRC's table for one byte, computed with zlib. zlib flips all bits before and after a CRC.
_TABLE = np.array([zlib.crc32(bytes([byte]), _ALL) ^ _ALL for byte in range(256)], np.uint32)


def prefix_state(text: str) -> int:
    """Return CRC-32's internal state after `text`."""
    return zlib.crc32(text.encode()) ^ _ALL


def crc_of_numbers(states: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the CRC-32 (int64) of each prefix followed by a decimal number. `states`: results of
    `prefix_state`, uint32. `numbers`: 0 to 2^31 - 1. The two arrays are broadcast.
    """
    state, numbers = np.broadcast_arrays(states.astype(np.uint32), numbers.astype(np.uint32))
    rest = numbers
    for place in reversed(range(len(str(int(numbers.max(initial=0)))))):
        power = np.uint32(10**place)
        digit = rest // power
        rest = rest - digit * power
        folded = _TABLE[(state ^ (digit + np.uint32(48))) & np.uint32(255)] ^ (state >> np.uint32(8))
        state = np.where(numbers < power, state, folded) if place else folded  # no leading zeros
    return (state ^ np.uint32(_ALL)).astype(np.int64)
