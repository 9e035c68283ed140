"""The port of a block store: bytes by key.

A store is not trusted. Whoever uses one seals what is put (`sealed.py`), has room for what may come before it
asks, and believes nothing that the seal does not hold. So a store may forget, lie, hang and be full: what it
costs is time, for which the engine has a deadline. A store from another package is an entry point in the
group `mmengine.block_stores`, a callable that takes the settings `block_store_path` and `block_store_bytes`.
"""

from collections.abc import Sequence
from typing import Protocol

MAX_KEY_BYTES = 64  # of a name under which something is kept


class BlockStore(Protocol):
    """Called by several threads at once, of several processes too. None of it raises for what is missing, or
    for a store that is full or cannot be reached."""

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of them are there, as far as that is known without reading."""

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> None:
        """Keep each value, the pieces of which follow one another. A key has one value for ever: one that is
        there stays, unless it is of another size. What does not fit is left out, or something else goes."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill each buffer with the value of its key; False where nothing is kept, or not of that size. A
        buffer that was not filled may hold anything."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget what turned out not to hold."""

    def close(self) -> None:
        """Free what is held; what was put stays where the store outlives processes."""
