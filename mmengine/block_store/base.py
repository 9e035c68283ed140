"""The interface for block stores, which map keys to bytes.

A store is not trusted. The engine seals each value (`sealed.py`), allocates the buffer before reading, and
uses only values with a valid seal. If a store loses or damages values, hangs or is full, this costs only
time, which the engine limits with a deadline. A store from another package is an entry point in the group
`mmengine.block_stores`: a callable that takes the settings `block_store_path` and `block_store_bytes`.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_KEY_BYTES = 64  # longest key


class BlockStore(Protocol):
    """Maps keys to values. Several threads and processes call it concurrently.

    No method raises for missing values, or for a store that is full or unreachable.
    """

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are present, as far as that is known without reading values."""

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> None:
        """Store each value, given as consecutive pieces.

        The value for a key never changes. If the key is already present with the same size, the store may
        keep the old value. If space is missing, the store skips the value or evicts another value.
        """

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill each buffer with its key's value. Returns, for each key, whether this succeeded: False if the
        value is missing or has another size.

        If the result is False, the buffer's contents are undefined.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove values that turned out to be damaged."""

    def close(self) -> None:
        """Release resources. Stored values stay if the store outlives processes."""
