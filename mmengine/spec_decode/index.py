"""Where n tokens in a row stood last: a table of fixed size by their hash, that forgets what collides.

What it finds is looked at again before it is used, so that a collision costs a draft and nothing else.
"""

import numpy as np

NOWHERE = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)


class GramIndex:
    """`num_tables` tables of 2^`bits` places each, int64."""

    def __init__(self, size: int, bits: int, num_tables: int = 1):
        self.size, self._shift = size, np.uint64(64 - bits)
        self._places = np.full((num_tables, 1 << bits), NOWHERE, np.int64)

    def hashes(self, grams: np.ndarray, salt: np.ndarray | int = 0) -> np.ndarray:
        """Of tokens [m, size], intp [m]. Other salts (uint64) give others."""
        mixed = np.broadcast_to(np.asarray(salt, np.uint64), len(grams))
        for column in grams.T:
            mixed = (mixed ^ column.astype(np.uint64)) * _MIX
            mixed = mixed ^ (mixed >> np.uint64(29))
        return ((mixed * _MIX) >> self._shift).astype(np.intp)

    def put(self, tables: np.ndarray | int, hashes: np.ndarray, places: np.ndarray) -> None:
        self._places[tables, hashes] = places

    def get(self, tables: np.ndarray | int, hashes: np.ndarray) -> np.ndarray:
        return self._places[tables, hashes]

    def clear(self, table: int) -> None:
        self._places[table] = NOWHERE
