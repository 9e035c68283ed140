"""The pool of LoRA adapters: which adapters' matrices are on the device, and which row computes with which
adapter.

Sizes are in bytes. As in the encoder cache, an adapter that no row holds stays loaded until its memory is
needed; the longest unused adapter leaves first.
"""

from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events.vocabulary import AdapterLoaded
from mmengine.request import Adapter


def digest_of(adapter: Adapter | None) -> bytes:
    """Return the adapter's digest, or b"" for None."""
    return b"" if adapter is None else adapter.digest


class AdapterPool:
    """One engine's adapters.

    `cache`: loaded adapters by digest. `of_row`: the adapter's digest of each row that has one, including
    rows that requests left while a step runs. `known`: the adapters that requests may name, by name.
    `nameless`: by digest, adapters of live requests that no name refers to any more; no decision reads them,
    so they are in no digest. Only `evolve` calls methods that change the pool.
    """

    def __init__(self, capacity: int):
        self.cache = EncoderCache(capacity)
        self.of_row: dict[int, bytes] = {}
        self.known: dict[str, AdapterLoaded] = {}
        self.nameless: dict[bytes, AdapterLoaded] = {}

    @property
    def num_held(self) -> int:
        """The number of adapters that rows hold."""
        return len(self.cache.entries) - len(self.cache.idle)

    @property
    def loaded(self) -> tuple[bytes, ...]:
        """The adapters' digests on the device."""
        return tuple(self.cache.entries)

    def is_held(self, digest: bytes) -> bool:
        return digest in self.cache.entries and digest not in self.cache.idle

    def room_for(self, adapter: Adapter, promised: int = 0) -> list[bytes] | None:
        """Return the adapters that must leave so that this adapter fits beside `promised` bytes for others,
        or None if all of them are not enough.
        """
        size = 0 if adapter.digest in self.cache.entries else adapter.num_bytes
        return self.cache.evictions_for(size, {adapter.digest}, promised)

    def take(self, row: int, adapter: Adapter, out: tuple[bytes, ...]) -> None:
        """Give the adapter to a row; the adapters in `out` leave."""
        for digest in out:
            self.cache.evict(digest)
        if adapter.digest not in self.cache.entries:
            self.cache.add(adapter.digest, adapter.num_bytes)
        self.cache.reference(adapter.digest)
        self.of_row[row] = adapter.digest

    def release(self, row: int) -> None:
        """Take the adapter from a free row. A row without an adapter is no error."""
        digest = self.of_row.pop(row, None)
        if digest is not None:
            self.cache.release(digest)
