"""Finds where an n-gram last occurred, in a hash table with a fixed size. On a collision, the newer entry
overwrites the older.

Drafters verify each match, so a collision only loses a draft.
"""

import numpy as np

NOWHERE = -1
NO_SALT = np.uint64(0)
_MIX = 0x9E3779B97F4A7C15


class GramIndex:
    """Hash tables for n-grams of length `size`.

    Each of the `num_tables` tables has 2^`bits` int64 positions.
    """

    def __init__(self, size: int, bits: int, num_tables: int = 1):
        self.size, self._shift = size, np.uint64(64 - bits)
        # Hashes are polynomials over the tokens, modulo 2^64.
        self._factors = np.array([pow(_MIX, power, 2**64) for power in range(1, size + 1)], np.uint64)
        self._places = np.full((num_tables, 1 << bits), NOWHERE, np.int64)

    def hashes(self, grams: np.ndarray, salt: np.ndarray | np.uint64 = NO_SALT) -> np.ndarray:
        """Return hashes (intp [m]) for n-grams [m, size]. The salt (uint64) is part of the hash."""
        mixed = (grams.astype(np.uint64) @ self._factors ^ salt) * self._factors[0]
        return (mixed >> self._shift).astype(np.intp)

    def put(self, tables: np.ndarray | int, hashes: np.ndarray, places: np.ndarray) -> None:
        self._places[tables, hashes] = places

    def get(self, tables: np.ndarray | int, hashes: np.ndarray) -> np.ndarray:
        return self._places[tables, hashes]

    def clear(self, table: int) -> None:
        self._places[table] = NOWHERE
