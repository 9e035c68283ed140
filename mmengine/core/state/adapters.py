"""The pool of LoRA adapters: which ones' matrices are on the device, and which row computes with which.

Sizes are in bytes. As in the encoder cache, an adapter that no row holds stays until its room is needed, the
longest unused first.
"""

from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events.vocabulary import AdapterLoaded
from mmengine.request import Adapter


def digest_of(adapter: Adapter | None) -> bytes:
    """b"" of none."""
    return b"" if adapter is None else adapter.digest


class AdapterPool:
    """`cache`: by digest. `of_row`: the digest of each row that has one, those that are being left included.
    `known`: what can be asked for, by name. `nameless`: by digest what live requests have and no name stands
    for any more; no decision reads it, so it is in no digest. Callers read; only `evolve` calls what
    changes."""

    def __init__(self, capacity: int):
        self.cache = EncoderCache(capacity)
        self.of_row: dict[int, bytes] = {}
        self.known: dict[str, AdapterLoaded] = {}
        self.nameless: dict[bytes, AdapterLoaded] = {}

    @property
    def num_held(self) -> int:
        """Adapters that rows hold."""
        return len(self.cache.entries) - len(self.cache.idle)

    @property
    def loaded(self) -> tuple[bytes, ...]:
        """The digests of the adapters on the device."""
        return tuple(self.cache.entries)

    def is_held(self, digest: bytes) -> bool:
        return digest in self.cache.entries and digest not in self.cache.idle

    def room_for(self, adapter: Adapter, promised: int = 0) -> list[bytes] | None:
        """Which others must leave so that its matrices are there, beside `promised` bytes for others; None
        where that does not suffice."""
        size = 0 if adapter.digest in self.cache.entries else adapter.num_bytes
        return self.cache.evictions_for(size, {adapter.digest}, promised)

    def take(self, row: int, adapter: Adapter, out: tuple[bytes, ...]) -> None:
        """A row computes with it from now on; those in `out` leave."""
        for digest in out:
            self.cache.evict(digest)
        if adapter.digest not in self.cache.entries:
            self.cache.add(adapter.digest, adapter.num_bytes)
        self.cache.reference(adapter.digest)
        self.of_row[row] = adapter.digest

    def release(self, row: int) -> None:
        """The row is free. One without an adapter is no error."""
        digest = self.of_row.pop(row, None)
        if digest is not None:
            self.cache.release(digest)
