"""Decides which encoder outputs stay cached, and computes their cache keys. The tensors themselves are in the
executor.

The cache counts how many requests reference each entry. Requests with equal items share an entry. Sizes are
in embeddings. An unreferenced entry stays until its space is needed; the least recently used entry is evicted
first.
"""

import hashlib
from dataclasses import dataclass


@dataclass(slots=True)
class CacheEntry:
    size: int
    references: int = 0
    valid: bool = True  # False: the step that computed the entry failed


def encoder_key(mm_hash: bytes, cache_salt: str, adapter: bytes = b"") -> bytes:
    """Return the cache key of an item. Tenants with different salts never share entries.

    `adapter`: the digest of an adapter that changes the encoder's output, or b"".
    """
    key = hashlib.sha256(mm_hash + cache_salt.encode()).digest() if cache_salt else mm_hash
    if adapter:
        return hashlib.blake2b(key + adapter, digest_size=32, person=b"mmengine-adapter").digest()
    return key


class EncoderCache:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self.entries: dict[bytes, CacheEntry] = {}
        self.idle: dict[bytes, None] = {}  # unreferenced keys, least recently used first
        self.idle_size = 0
        # keys of failed or incomplete outputs; the executor drops their tensors in the next step
        self.dropped: list[bytes] = []

    def has(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.valid

    def size_of(self, key: bytes) -> int:
        """Return the size of an entry in embeddings."""
        return self.entries[key].size

    def evictions_for(self, size: int, keep: set[bytes], extra: int) -> list[bytes] | None:
        """Return the keys to evict so that `size` more embeddings fit, or None if this is impossible.

        `extra`: number of embeddings that the caller will add before these `size` embeddings. `keep`: entries
        that must not be returned: they will soon be referenced, or are already chosen for eviction.
        """
        room = self.capacity - self.used - extra
        evicted = []
        for key in self.idle:
            if room >= size:
                break
            if key not in keep:
                evicted.append(key)
                room += self.entries[key].size
        return evicted if room >= size else None

    def room(self, keep: set[bytes], extra: int) -> int:
        """Return how many embeddings would fit after adding `extra` embeddings and evicting all unreferenced
        entries, except the entries in `keep`.
        """
        idle = sum(self.entries[key].size for key in self.idle if key not in keep)
        return self.capacity - self.used - extra + idle

    def add(self, key: bytes, size: int) -> None:
        self.entries[key] = CacheEntry(size)
        self.idle[key] = None
        self.used += size
        self.idle_size += size

    def restore(self, key: bytes, size: int, references: int, valid: bool) -> None:
        """Add an entry as a snapshot describes it."""
        self.add(key, size)
        self.entries[key].references, self.entries[key].valid = references, valid
        if references:
            del self.idle[key]
            self.idle_size -= size

    def evict(self, key: bytes) -> None:
        entry = self.entries.pop(key)
        del self.idle[key]
        self.used -= entry.size
        self.idle_size -= entry.size

    def reference(self, key: bytes) -> None:
        entry = self.entries[key]
        if entry.references == 0:
            del self.idle[key]
            self.idle_size -= entry.size
        entry.references += 1

    def touch(self, key: bytes) -> None:
        """Mark an unreferenced entry as just used."""
        del self.idle[key]
        self.idle[key] = None

    def release(self, key: bytes) -> None:
        entry = self.entries[key]
        entry.references -= 1
        if entry.references == 0:
            self.idle[key] = None
            self.idle_size += entry.size
            if not entry.valid:
                self._drop(key)

    def invalidate(self, key: bytes) -> None:
        """Mark an entry as failed. A failed entry gets no new references, and is removed when its last
        reference is released.
        """
        entry = self.entries[key]
        entry.valid = False
        if entry.references == 0:
            self._drop(key)

    def clear(self) -> None:
        """Remove all entries, which must be unreferenced."""
        self.entries.clear()
        self.idle.clear()
        self.dropped.clear()
        self.used = self.idle_size = 0

    def _drop(self, key: bytes) -> None:
        self.evict(key)
        self.dropped.append(key)
