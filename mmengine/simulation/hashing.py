"""CRC-32 over many short texts at once: a prefix for each row, followed by a number.

The fake model's tokens are CRC-32s over texts like "request:1234". The checksum is a fold over bytes. So the
state after the prefix is kept, and all numbers' digits go through the table together.
"""

import zlib

import numpy as np

_ALL = 0xFFFFFFFF
# The fold's table, taken from zlib, which flips all bits before and after a fold.
_TABLE = np.array([zlib.crc32(bytes([byte]), _ALL) ^ _ALL for byte in range(256)], np.uint32)


def prefix_state(text: str) -> int:
    """Return the fold's state after `text`."""
    return zlib.crc32(text.encode()) ^ _ALL


def crc_of_numbers(states: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return CRC-32 over prefix + decimal number, as int64. `states`: uint32 from `prefix_state`; `numbers`:
    0 to 2^31 - 1. The two broadcast.
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
