"""Serves /health, /health/ready and /health/live on a separate port, even before an engine exists.

This module is a small HTTP/1.1 server with non-blocking sockets. Any client may connect, so there are limits.
A request head has at most MAX_HEAD_BYTES bytes, and a connection lasts at most ASKING_S seconds. If
MAX_PROBES connections are open, a new connection closes the oldest.
"""

import http
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from mmengine.errors import ErrorCode
from mmengine.server.http.errors import LATER_S, ApiError, not_ready_error

MAX_HEAD_BYTES = 4096  # Limit for the request head.
MAX_PROBES = 64  # Maximum number of concurrent connections.
ASKING_S = 5.0  # Maximum number of seconds that a connection lasts.
READ_BYTES = 4096
PATHS = ("/health", "/health/ready", "/health/live")


class Health(msgspec.Struct, frozen=True):
    """The state that the health port reports.

    `has_report`: whether a serving engine reported the state. In this case, the server is ready if there are
    no reasons. Otherwise the server is not ready, and `reasons` say why. `is_alive`: False if the supervisor
    and the engine should be restarted.
    """

    reasons: tuple[str, ...]
    retry_after_s: int
    has_report: bool
    is_alive: bool = True


def silent(silent_s: float, late_s: float, stuck_s: float) -> Health | None:
    """Return the state for an engine whose event loop has sent no heartbeat for `silent_s` seconds. Returns
    None if the heartbeat is not late. The engine is not ready after `late_s` seconds, and not alive after
    `stuck_s` seconds.
    """
    if silent_s <= late_s:
        return None
    why = f"the engine has not responded for {silent_s:.0f} seconds"
    return Health((why,), LATER_S, has_report=False, is_alive=silent_s <= stuck_s)


def reported(reasons: tuple[str, ...], retry_after_s: int, is_frozen: bool) -> Health:
    """Return the state that a serving engine reports. A frozen engine's report does not count as a report."""
    return Health(reasons, retry_after_s, has_report=not is_frozen, is_alive=not is_frozen)


class HealthPort:
    """The health port's listening socket and connections. All of them are registered with `selector`. When a
    socket is readable, the selector's owner calls the function in the selector key's `data`.
    """

    def __init__(
        self, bound: socket.socket, selector: selectors.BaseSelector, health: Callable[[], Health]
    ) -> None:
        self._selector, self._bound = selector, bound
        self._probes = Probes(selector, health)
        selector.register(bound, selectors.EVENT_READ, self._take)

    def wait_s(self) -> float | None:
        """Return the seconds until `tidy` must be called, or None if there is no connection."""
        return self._probes.wait_s()

    def tidy(self) -> None:
        """Close connections that have reached their time limit."""
        self._probes.tidy()

    def close(self) -> None:
        self._selector.unregister(self._bound)
        self._bound.close()
        self._probes.close()

    def _take(self) -> None:
        with suppress(OSError):  # The client has already disconnected.
            connection, _ = self._bound.accept()
            self._probes.adopt(connection)


class Probes:
    """Connections with health probes, registered with `selector`. Each connection gets a single response."""

    def __init__(self, selector: selectors.BaseSelector, health: Callable[[], Health]) -> None:
        self._selector, self._health = selector, health
        self._asking: dict[socket.socket, _Probe] = {}  # Oldest first.

    def adopt(self, connection: socket.socket, head: bytes = b"") -> None:
        """Read a request head from a connection, respond, and close the connection. `head`: the connection's
        first bytes, which are still in the socket.
        """
        probe = _Probe(connection)
        # Respond to a complete head first, because every later system call may have to wait for the GIL.
        if b"\r\n\r\n" in head:
            probe.is_answered = True
            with suppress(OSError):
                connection.send(answer_to(head, self._health))
                connection.shutdown(socket.SHUT_WR)
        if len(self._asking) >= MAX_PROBES:
            self._drop(next(iter(self._asking.values())))
        connection.setblocking(False)
        self._asking[connection] = probe
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(probe))

    def wait_s(self) -> float | None:
        """Return the seconds until `tidy` must be called, or None if there is no connection."""
        oldest = next(iter(self._asking.values()), None)
        return None if oldest is None else max(0.0, oldest.until - time.monotonic())

    def tidy(self) -> None:
        """Close connections that have reached their time limit."""
        now = time.monotonic()
        for probe in [each for each in self._asking.values() if each.until <= now]:
            self._drop(probe)

    def close(self) -> None:
        for probe in list(self._asking.values()):
            self._drop(probe)

    def _read(self, probe: "_Probe") -> None:
        # A newer connection may have replaced this connection in the same round of the selector.
        if probe.connection not in self._asking:
            return
        try:
            data = probe.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        probe.head += data
        if not data or len(probe.head) > 2 * MAX_HEAD_BYTES:
            self._drop(probe)
            return
        # Read until the client closes the connection. Closing a socket with unread bytes would discard the
        # response.
        if probe.is_answered:
            return
        if b"\r\n\r\n" in probe.head or len(probe.head) > MAX_HEAD_BYTES:
            self._answer(probe)

    def _answer(self, probe: "_Probe") -> None:
        probe.is_answered = True
        try:
            # The response fits into the socket buffer, which is empty.
            probe.connection.send(answer_to(probe.head, self._health))
            probe.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(probe)

    def _drop(self, probe: "_Probe") -> None:
        self._asking.pop(probe.connection, None)
        self._selector.unregister(probe.connection)
        probe.connection.close()


class _Probe:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.head = connection, b""
        self.is_answered, self.until = False, time.monotonic() + ASKING_S


def answer_to(head: bytes, health: Callable[[], Health]) -> bytes:
    """Return the HTTP response to a request head."""
    line = head.partition(b"\r\n")[0].split(b" ")
    if len(head) > MAX_HEAD_BYTES:
        return _refusal(ApiError(ErrorCode.HEAD_TOO_LARGE, f"the head exceeds {MAX_HEAD_BYTES} bytes"))
    if len(line) != 3 or not line[2].startswith(b"HTTP/1."):
        return _refusal(ApiError(ErrorCode.INVALID_VALUE, "the bytes are not HTTP/1.1"))
    method, path = line[0], line[1].partition(b"?")[0].decode("latin-1")
    if path not in PATHS:
        return _refusal(ApiError(ErrorCode.UNKNOWN_URL, f"unknown path; use {', '.join(PATHS)}"))
    if method not in (b"GET", b"HEAD"):
        return _refusal(ApiError(ErrorCode.METHOD_NOT_ALLOWED, "use GET", headers={"allow": "GET, HEAD"}))
    found = health()
    answer = _live(found) if path == "/health/live" else _ready(found)
    return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if method == b"HEAD" else answer


def _live(found: Health) -> bytes:
    if found.is_alive:
        return _written(200, {}, msgspec.json.encode({"status": "alive"}))
    return _refusal(not_ready_error(found.reasons, found.retry_after_s))


def _ready(found: Health) -> bytes:
    """Return the response to /health. If an engine reported the state, the response equals the engine's own
    response.
    """
    if not found.has_report:
        return _refusal(not_ready_error(found.reasons, found.retry_after_s))
    status = "not ready" if found.reasons else "ready"
    body = msgspec.json.encode({"status": status, "reasons": list(found.reasons)})
    if not found.reasons:
        return _written(200, {}, body)
    return _written(503, {"retry-after": str(found.retry_after_s)}, body)


def _refusal(error: ApiError) -> bytes:
    return _written(error.status, error.headers, error.json())


def _written(status: int, headers: dict[str, str], body: bytes) -> bytes:
    fixed = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "cache-control": "no-store",
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**fixed, **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
