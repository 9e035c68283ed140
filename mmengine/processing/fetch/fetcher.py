"""Fetches the URLs and files that untrusted messages name. Fetches wait in a queue until a thread may run
them.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmengine.processing.fetch.addresses import AddressPolicy, IPAddress, is_public
from mmengine.processing.fetch.connection import Connection
from mmengine.processing.fetch.deadline import Deadline
from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.local_files import LocalFiles
from mmengine.processing.fetch.prompt_fetch import PromptFetch, Wanted
from mmengine.processing.fetch.refusals import FetchRefused, refused
from mmengine.processing.fetch.transfer import Redirect, get
from mmengine.processing.fetch.urls import Url, parse_url
from mmengine.processing.workers.attempt import AttemptOver

Resolver = Callable[[str], Sequence[IPAddress]]  # Raises OSError or UnicodeError for an unknown name.
MAX_LOOKUPS = 32  # Maximum number of concurrent lookups, including lookups that hang.
MAX_ANSWERS = 64  # Maximum number of addresses per name; names with more are refused.


def system_resolver(name: str) -> list[IPAddress]:
    """Return the addresses in a name's A and AAAA records. The query ends with a dot to skip this machine's
    search domains.
    """
    found = socket.getaddrinfo(f"{name}.", None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0])) for entry in found))


class Lookups:
    """Resolves host names with `resolve`. `is_allowed`: returns whether an address is allowed."""

    def __init__(self, resolve: Resolver, is_allowed: AddressPolicy) -> None:
        self._resolve, self._is_allowed = resolve, is_allowed
        self._room = threading.BoundedSemaphore(MAX_LOOKUPS)

    def addresses(self, url: Url, deadline: Deadline) -> list[IPAddress]:
        """Return all addresses of the host. Raises FetchRefused if an address is not allowed, for an unknown
        name, and at the deadline. Raises AttemptOver after a cancellation.
        """
        found = [url.literal] if url.literal is not None else self._lookup(url.host, deadline)
        if not 1 <= len(found) <= MAX_ANSWERS or not all(map(self._is_allowed, found)):
            raise refused("address")
        return found

    def _lookup(self, name: str, deadline: Deadline) -> list[IPAddress]:
        found: list[IPAddress] = []
        ready = threading.Event()

        def look() -> None:
            try:
                found.extend(self._resolve(name))
            except (OSError, UnicodeError, ValueError):
                pass  # The name is unknown, so it has no address.
            finally:
                self._room.release()
                ready.set()

        while not self._room.acquire(timeout=min(deadline.check(), 0.1)):
            pass
        threading.Thread(target=look, name="mmengine-lookup", daemon=True).start()
        deadline.wait_until(ready)
        return found


_IDLE_S = 10.0  # Seconds after which an idle thread ends.
_LOCAL = ""  # Host name for files.


class Fetched(NamedTuple):
    """The outcome of a fetch. `reason`: a name in refusals.REASONS, or "" for success. `host`: the requested
    host, or "" for a file or an invalid URL.
    """

    seconds: float
    num_bytes: int
    reason: str
    host: str


class MediaFetcher:
    """Fetches media for prompts. Thread-safe.

    `on_fetched`: called with the outcome of each fetch. Only tests pass `resolve`, `is_allowed` and `tls`.
    Without `tls`, the system's certificate authorities are trusted.
    """

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolve: Resolver = system_resolver,
        is_allowed: AddressPolicy = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.on_fetched: Callable[[Fetched], None] = lambda fetched: None
        self._lookups = Lookups(resolve, is_allowed)
        self._tls = tls or ssl.create_default_context()
        self._files = LocalFiles(limits.root) if limits.root is not None else None
        self._changed = threading.Condition()
        self._queue: deque[Wanted] = deque()
        self._holders: dict[PromptFetch, None] = {}  # Prompts that are not yet released, oldest first.
        self._hosts: Counter[str] = Counter()  # Number of running fetches per host.
        self._num_threads = self._num_idle = 0

    @property
    def reads_files(self) -> bool:
        return self._files is not None

    @property
    def num_running(self) -> int:
        return self._hosts.total()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of fetched, unreleased media plus the bytes that running fetches reserve."""
        return sum(each.num_bytes for each in list(self._holders))

    def begin(
        self,
        names: Sequence[str],
        done: Callable[[PromptFetch], None] = lambda fetching: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> PromptFetch:
        """Start fetching the URLs and files in `names`, without duplicates. `done`: called on a fetcher's
        thread when all items have arrived or an item is refused. `is_over`: returns whether the request was
        given up. The caller must release the returned object.
        """
        fetching = PromptFetch(self.limits, done, is_over, self._release)
        wanted = [Wanted(name, fetching, _host_of(name)) for name in dict.fromkeys(names)]
        if len(wanted) > self.limits.max_urls:
            raise refused("count", f"at most {self.limits.max_urls}")
        fetching.expect(len(wanted))
        with self._changed:
            self._holders[fetching] = None
            self._queue.extend(wanted)
            missing = min(len(self._queue) - self._num_idle, self.limits.max_fetches - self._num_threads)
            for _ in range(missing):
                self._num_threads += 1
                threading.Thread(target=self._run, name="mmengine-fetch", daemon=True).start()
            self._changed.notify_all()
        return fetching

    def _release(self, fetching: PromptFetch) -> None:
        with self._changed:
            self._holders.pop(fetching, None)
            self._changed.notify_all()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            try:
                self._fetch(wanted)
            finally:
                with self._changed:
                    self._hosts[wanted.host] -= 1
                    wanted.fetching.num_running -= 1
                    self._changed.notify_all()
            del wanted

    def _next(self) -> Wanted | None:
        """Remove and return the first queued fetch that may start. Return None after _IDLE_S without work."""
        with self._changed:
            self._num_idle += 1
            try:
                while (found := self._first()) is None:
                    if not self._changed.wait(_IDLE_S) and not self._queue:
                        self._num_threads -= 1
                        return None
            finally:
                self._num_idle -= 1
            self._queue.remove(found)
            self._hosts[found.host] += 1
            found.fetching.num_running += 1
            found.fetching.num_bytes += self.limits.max_bytes  # Reserve the maximum until the size is known.
            return found

    def _first(self) -> Wanted | None:
        """Return the first fetch that may start, or None. The oldest prompt's fetches may exceed
        `max_bytes_in_flight`. Otherwise prompts could wait for each other forever.
        """
        limits, oldest = self.limits, next(iter(self._holders), None)
        has_bytes = self.num_bytes + limits.max_bytes <= limits.max_bytes_in_flight
        for wanted in self._queue:
            fetching = wanted.fetching
            has_place = (
                self._hosts[wanted.host] < limits.max_fetches_a_host
                and fetching.num_running < limits.max_fetches_a_prompt
                and (has_bytes or fetching is oldest)
            )
            if has_place or fetching.is_over:
                return wanted
        return None

    def _fetch(self, wanted: Wanted) -> None:
        begun, reason, data = time.monotonic(), "", b""
        try:
            data = self._data(wanted)
            wanted.fetching.put(wanted.name, data)
        except FetchRefused as error:
            reason = error.reason
            wanted.fetching.fail(wanted.name, error)
        except AttemptOver as error:
            reason = "given_up"
            wanted.fetching.fail(wanted.name, error)
        except Exception as error:  # A bug must fail only this request.
            reason = "failed"
            wanted.fetching.fail(wanted.name, error)
        self.on_fetched(Fetched(time.monotonic() - begun, len(data), reason, wanted.host))

    def _data(self, wanted: Wanted) -> bytes:
        fetching, limits = wanted.fetching, self.limits
        deadline = Deadline(limits.timeout_s, lambda: fetching.is_over)
        deadline.check()
        if wanted.is_url:
            return self._get(wanted.name, deadline, fetching.count_bytes)
        if self._files is None:
            raise refused("file")
        data = self._files.read(wanted.name, limits.max_bytes)
        fetching.count_bytes(len(data))
        return data

    def _get(self, name: str, deadline: Deadline, count_bytes: Callable[[int], None]) -> bytes:
        """Fetch a URL. The target of each redirect is checked like the original URL."""
        for _ in range(self.limits.max_redirects + 1):
            url = self._checked(parse_url(name))
            connection = Connection(url, self._lookups.addresses(url, deadline), self._tls, deadline)
            try:
                found = get(url, connection, self.limits.max_bytes, count_bytes)
            finally:
                connection.close()
            if not isinstance(found, Redirect):
                return found
            name = url.joined(found.location)
        raise refused("redirects")

    def _checked(self, url: Url) -> Url:
        if self.limits.hosts == ():
            raise refused("off")
        if url.scheme == "http" and not self.limits.http:
            raise refused("scheme")
        if url.port not in self.limits.ports:
            raise refused("port")
        if not self.limits.allows_host(url.host):
            raise refused("host")
        return url


def _host_of(name: str) -> str:
    try:
        return parse_url(name).host
    except FetchRefused:
        return _LOCAL
