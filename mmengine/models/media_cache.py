"""Caches prepared media by content, so that a repeated image need not be decoded and resized again."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")
DEFAULT_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Flight(Generic[V]):
    """A value that one caller is computing while other callers wait."""

    done: threading.Event = field(default_factory=threading.Event)
    value: V | None = None  # None: the computation failed.


class MediaCache(Generic[V]):
    """A thread-safe LRU cache.

    If several callers request the same missing value at the same time, one caller computes the value and the
    others wait. If the computation fails, only the computing caller gets the exception, and the next caller
    computes the value again. A key is a hash of the tenant's salt, the encoded bytes and the options.
    `max_bytes` may be set at any time; 0 turns the cache off.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.hits = 0  # Counts lookups that found a value or waited for another caller's value.
        self.misses = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._flights: dict[bytes, _Flight[V]] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        with self._lock:
            self._max_bytes = value
            self._evict()

    def get(self, key: bytes, make: Callable[[], V], size_of: Callable[[V], int]) -> V:
        """Return the value for `key`. If it is not cached, call `make` to compute it.

        `size_of`: returns a value's size in bytes. A value that is larger than `max_bytes` is not stored.
        Exceptions from `make` are passed on.
        """
        while True:
            with self._lock:
                found = self._values.get(key)
                if found is not None:
                    self._values.move_to_end(key)
                    self.hits += 1
                    return found[0]
                flight = self._flights.get(key)
                if flight is None:
                    self._flights[key] = flight = _Flight()
                    break
            flight.done.wait()
            if flight.value is not None:
                with self._lock:
                    self.hits += 1
                return flight.value
        try:
            value = make()
            self._keep(key, value, size_of(value))
            flight.value = value
            return value
        finally:
            with self._lock:
                self.misses += 1
                del self._flights[key]
            flight.done.set()

    def _keep(self, key: bytes, value: V, size: int) -> None:
        with self._lock:
            if size <= self._max_bytes:
                self._values[key] = value, size
                self.num_bytes += size
                self._evict()

    def forget(self, key: bytes) -> None:
        """Remove the value for `key`, if cached."""
        with self._lock:
            _, size = self._values.pop(key, (None, 0))
            self.num_bytes -= size

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes:
            _, (_, size) = self._values.popitem(last=False)
            self.num_bytes -= size
