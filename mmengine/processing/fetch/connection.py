"""A connection to a checked address, with or without TLS. All waits end at a deadline."""

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from mmengine.processing.fetch.addresses import IPAddress
from mmengine.processing.fetch.deadline import Deadline
from mmengine.processing.fetch.refusals import FetchRefused, refused
from mmengine.processing.fetch.urls import Url

CHUNK = 2**16
MAX_TRIED = 3  # Maximum number of addresses that are tried per host.
_T = TypeVar("_T")


class Connection:
    """An open connection; `close` ends it. Raises FetchRefused, or AttemptOver after a cancellation."""

    def __init__(
        self, url: Url, addresses: Sequence[IPAddress], tls: ssl.SSLContext, deadline: Deadline
    ) -> None:
        self._deadline = deadline
        plain = _connect(url.port, addresses, deadline)
        self._socket = plain
        if url.scheme == "https":
            try:
                self._socket = self._secured(plain, url.host, tls)
            except BaseException:
                plain.close()
                raise

    def _secured(self, plain: socket.socket, host: str, tls: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            found = tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        except (OSError, ValueError):  # No certificate can have this name, or the connection is gone.
            raise refused("tls") from None
        try:
            self._retried(found, found.do_handshake, select.POLLIN)
        except BaseException as error:
            found.close()
            if isinstance(error, OSError):
                raise refused("tls") from None
            raise
        return found

    def _retried(self, one: socket.socket, call: Callable[[], _T], what: int) -> _T:
        """Repeat `call` until it succeeds, and return its result. Between calls, wait until the socket is
        ready. `what`: the poll event for a plain socket. A TLS socket names the event in its exception.
        """
        while True:
            self._deadline.check()
            try:
                return call()
            except BlockingIOError:
                self._deadline.wait_for(one, what)
            except ssl.SSLWantReadError:
                self._deadline.wait_for(one, select.POLLIN)
            except ssl.SSLWantWriteError:
                self._deadline.wait_for(one, select.POLLOUT)

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                count = self._retried(self._socket, partial(self._socket.send, view), select.POLLOUT)
                view = view[count:]
        except OSError:
            raise refused("protocol") from None

    def receive(self) -> bytes:
        """Return received bytes, or b"" at the end of the stream."""
        try:
            return self._retried(self._socket, partial(self._socket.recv, CHUNK), select.POLLIN)
        except OSError:
            raise refused("protocol") from None

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _connect(port: int, addresses: Sequence[IPAddress], deadline: Deadline) -> socket.socket:
    """Connect to the first address that answers. Each attempt gets an equal share of the remaining time."""
    tried = addresses[:MAX_TRIED]
    for number, address in enumerate(tried):
        part = deadline.part(len(tried) - number)
        one = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        try:
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect((str(address), port))
            part.wait_for(one, select.POLLOUT)
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return one
        except FetchRefused:  # The attempt used up its share of the time.
            deadline.check()
        except OSError:
            pass
        except BaseException:
            one.close()
            raise
        one.close()
    raise refused("connect")
