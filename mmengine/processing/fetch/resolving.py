"""Names to addresses, in a bounded time: the system's own resolver cannot be ended."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence

from mmengine.processing.fetch.addresses import AddressPolicy, IPAddress
from mmengine.processing.fetch.refusals import refused
from mmengine.processing.fetch.urls import Url
from mmengine.processing.fetch.watch import Watch

Resolver = Callable[[str], Sequence[IPAddress]]  # raises OSError, UnicodeError for a name that is not known
MAX_LOOKUPS = 32  # that the system works on; one that hangs keeps its place
MAX_ANSWERS = 64  # of one name; with more of them it is refused


def system_resolver(name: str) -> list[IPAddress]:
    """Of all records of both kinds. The dot at the end keeps this machine's search domains out."""
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0])) for entry in found))


class Lookups:
    """`resolve`, once for each fetch; `is_allowed`: which addresses may be connected."""

    def __init__(self, resolve: Resolver, is_allowed: AddressPolicy) -> None:
        self._resolve, self._is_allowed = resolve, is_allowed
        self._room = threading.BoundedSemaphore(MAX_LOOKUPS)

    def addresses(self, url: Url, watch: Watch) -> list[IPAddress]:
        """All that the URL's host has, of which each is allowed. Raises FetchRefused, AttemptOver."""
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
                pass  # not known: there is no address
            finally:
                self._room.release()
                ready.set()

        while not self._room.acquire(timeout=min(watch.check(), 0.1)):
            pass
        threading.Thread(target=look, name="mmengine-lookup", daemon=True).start()
        watch.wait_until(ready)
        return found
