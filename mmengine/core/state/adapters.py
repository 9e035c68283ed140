"""The LoRA adapter pool: which adapters are loaded on the device, and which adapter each row uses.

Sizes are in bytes. Unused adapters stay loaded until their memory is needed. The least recently used adapter
is unloaded first.
"""

from mmengine.encoder_cache.cache import EncoderCache
from mmengine.events.vocabulary import AdapterLoaded
from mmengine.request import Adapter


def digest_of(adapter: Adapter | None) -> bytes:
    """Return the adapter's digest, or b"" for None."""
    return b"" if adapter is None else adapter.digest


class AdapterPool:
    """One engine's adapters.

    `cache`: the loaded adapters, by digest. `of_row`: row -> its adapter's digest. A row stays in `of_row`
    while a step computes the row, even if its request has left. `known`: name -> the adapter for new requests
    with this name. `nameless`: digest -> an adapter that live requests still use, but that is not in `known`.
    The state's digest omits `nameless`, because no decision reads `nameless`. Only `evolve` changes the pool.
    """

    def __init__(self, capacity: int):
        self.cache = EncoderCache(capacity)
        self.of_row: dict[int, bytes] = {}
        self.known: dict[str, AdapterLoaded] = {}
        self.nameless: dict[bytes, AdapterLoaded] = {}

    @property
    def num_held(self) -> int:
        """The number of adapters that rows use."""
        return len(self.cache.entries) - len(self.cache.idle)

    @property
    def loaded(self) -> tuple[bytes, ...]:
        """The loaded adapters' digests."""
        return tuple(self.cache.entries)

    def is_held(self, digest: bytes) -> bool:
        return digest in self.cache.entries and digest not in self.cache.idle

    def room_for(self, adapter: Adapter, promised: int = 0) -> list[bytes] | None:
        """Return the digests of adapters to unload so that `adapter` fits, or None if unloading all unused
        adapters frees too little memory. `promised`: bytes that are reserved for other waiting adapters.
        """
        size = 0 if adapter.digest in self.cache.entries else adapter.num_bytes
        return self.cache.evictions_for(size, {adapter.digest}, promised)

    def take(self, row: int, adapter: Adapter, out: tuple[bytes, ...]) -> None:
        """Unload the adapters in `out`, load `adapter` if necessary, and assign `adapter` to the row."""
        for digest in out:
            self.cache.evict(digest)
        if adapter.digest not in self.cache.entries:
            self.cache.add(adapter.digest, adapter.num_bytes)
        self.cache.reference(adapter.digest)
        self.of_row[row] = adapter.digest

    def release(self, row: int) -> None:
        """Release the row's adapter, if it has one."""
        digest = self.of_row.pop(row, None)
        if digest is not None:
            self.cache.release(digest)
