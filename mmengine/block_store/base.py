"""The interface of block stores: key-value stores that keep KV blocks outside the engine's process.

The engine does not trust a store. The engine adds a header with a digest to each value (`sealed.py`), and
uses only values whose digest is valid. A store that hangs, or loses or damages values, costs only time.
Deadlines limit this time. Another package declares its store as an entry point in the group
`mmengine.block_stores`. The entry point is a callable that takes the settings `block_store_path` and
`block_store_bytes`.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_KEY_BYTES = 64  # maximum length of a key


class BlockStore(Protocol):
    """Maps keys to values. Several threads and processes use a store concurrently.

    No method raises an error for missing values, or because the store is full or unreachable.
    """

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are present. The result may be inexact, because values are not read."""

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> None:
        """Store the values. Each value is a sequence of buffers to concatenate.

        The value for a key never changes. If the store already has a value of the same size for the key,
        the store may keep the old value. If the store is full, the store skips the value or evicts another
        value.
        """

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Read the value of keys[i] into buffers[i] for every i, and return for each key whether the read
        succeeded.

        False means that the value is missing or has another size. The buffer's contents are then undefined.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values that proved to be damaged."""

    def close(self) -> None:
        """Release this process's resources. A persistent store keeps its values."""
