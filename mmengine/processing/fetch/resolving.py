"""Resolves host names in a bounded time, although the system's resolver cannot be interrupted."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence

from mmengine.processing.fetch.addresses import AddressPolicy, IPAddress
from mmengine.processing.fetch.refusals import refused
from mmengine.processing.fetch.urls import Url
from mmengine.processing.fetch.watch import Watch

Resolver = Callable[[str], Sequence[IPAddress]]  # Raises OSError or UnicodeError for an unknown name.
MAX_LOOKUPS = 32  # Concurrent lookups; a hanging lookup keeps its slot.
MAX_ANSWERS = 64  # Per name; a name with more is refused.


def system_resolver(name: str) -> list[IPAddress]:
    """Return the addresses in all A and AAAA records. The final dot excludes this machine's search
    domains."""
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0])) for entry in found))


class Lookups:
    """Resolves names with `resolve`, once per fetch. `is_allowed`: decides which addresses may be
    connected."""

    def __init__(self, resolve: Resolver, is_allowed: AddressPolicy) -> None:
        self._resolve, self._is_allowed = resolve, is_allowed
        self._room = threading.BoundedSemaphore(MAX_LOOKUPS)

    def addresses(self, url: Url, watch: Watch) -> list[IPAddress]:
        """Return all addresses of the URL's host; each must be allowed. Raises FetchRefused, AttemptOver."""
        found = [url.literal] if url.literal is not None else self._lookup(url.host, watch)
        if not 1 <= len(found) <= MAX_ANSWERS or not all(map(self._is_allowed, found)):
            raise refused("address")
        return found

    def _lookup(self, name: str, watch: Watch) -> list[IPAddress]:
        found: list[IPAddress] = []
        ready = threading.Event()

        def look() -> None:
            try:
                found.extend(self._resolve(name))
            except (OSError, UnicodeError, ValueError):
                pass  # Unknown: there is no address.
            finally:
                self._room.release()
                ready.set()

        while not self._room.acquire(timeout=min(watch.check(), 0.1)):
            pass
        threading.Thread(target=look, name="mmengine-lookup", daemon=True).start()
        watch.wait_until(ready)
        return found
