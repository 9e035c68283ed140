"""Accepts the server's connections on a separate thread, which also responds to health probes (GET
/health/live).

A busy event loop would respond late to a probe, and an orchestrator would kill a working server. Therefore
the thread peeks at each new connection's first bytes. It responds to a probe itself, and passes every other
connection to the event loop.
"""

import asyncio
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.lifecycle.health_port import Health, HealthPort, Probes
from mmengine.server.transport.quick_sockets import accept, peek

FIRST_BYTES_S = 1.0  # Seconds after which a silent new connection is passed to the event loop.
# Maximum number of silent connections. If there are more, the oldest is passed to the event loop.
MAX_SILENT = 256
MAX_WAITING = 1024  # Maximum number of connections that wait for the event loop.
ACCEPT_AGAIN_S = 0.05  # Seconds of pause when no further connection can be accepted.
ACCEPTED_AT_ONCE = 32  # Maximum number of connections accepted before the other sockets are polled.
_LIVE = (b"GET /health/live ", b"GET /health/live?")
Connect = Callable[[socket.socket], Awaitable[object]]


class Acceptor:
    """Accepts connections on the listening socket `bound` until `close`.

    `connect`: starts the HTTP protocol for a connection. Runs on the event loop, on which the Acceptor must
    also be created. `health` returns the state for probes. `probed` is called for each probe, with True if
    the server is alive. `health` and `probed` run on the acceptor's thread. `health_socket`: the listening
    socket of a separate health port, or None.
    """

    def __init__(
        self,
        bound: socket.socket | None,
        connect: Connect,
        health: Callable[[], Health],
        probed: Callable[[bool], None],
        health_socket: socket.socket | None = None,
    ) -> None:
        self._bound, self._connect, self._health, self._probed = bound, connect, health, probed
        if bound is not None:
            bound.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._selector = selectors.DefaultSelector()
        self._probes = Probes(self._selector, self._reported)
        self._port: HealthPort | None = None
        if health_socket is not None:
            self._port = HealthPort(health_socket, self._selector, health)
        # Silent connection -> the time when the connection is passed to the event loop. Oldest first.
        self._silent: dict[socket.socket, float] = {}
        self._waiting: deque[socket.socket] = deque()  # Connections for the event loop.
        self._is_called = False  # Whether `_take_over` is scheduled on the loop.
        # Holds the tasks, so that they are not garbage collected.
        self._connecting: set[asyncio.Task[object]] = set()
        self._is_paused, self._accept_at, self._is_closing = True, 0.0, False
        self._wakes, self._awake = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._drain)
        self._thread = threading.Thread(target=self._run, name="mmengine-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections. May be called twice."""
        if not self._is_closing:
            self._is_closing = True
            self._awake.send(b"x")
            self._thread.join()
            self._awake.close()

    # The acceptor's thread

    def _run(self) -> None:
        while not self._is_closing:
            self._pause_or_resume()
            for key, _ in self._selector.select(self._wait_s()):
                try:
                    key.data()
                except Exception as error:  # An error of a single connection must not end the thread.
                    operator_log.error("a connection was lost while it was accepted", reason=repr(error))
            self._tidy()
        for connection in list(self._silent):
            self._pass_on_silent(connection)
        self._probes.close()
        if self._port is not None:
            self._port.close()
        self._selector.close()
        self._wakes.close()

    def _drain(self) -> None:
        self._wakes.recv(4096)

    def _pause_or_resume(self) -> None:
        """Pause while MAX_WAITING connections wait for the event loop, and for ACCEPT_AGAIN_S seconds after
        a failure.
        """
        if self._bound is None:
            return
        pauses = len(self._waiting) >= MAX_WAITING or time.monotonic() < self._accept_at
        if pauses and not self._is_paused:
            self._selector.unregister(self._bound)
        elif self._is_paused and not pauses:
            self._selector.register(self._bound, selectors.EVENT_READ, self._accept)
        self._is_paused = pauses

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        waits = [max(0.0, until - now) for until in list(self._silent.values())[:1]]
        waits += [ACCEPT_AGAIN_S] if self._is_paused and self._bound is not None else []
        waits += [
            wait_s for one in (self._probes, self._port) if one and (wait_s := one.wait_s()) is not None
        ]
        return min(waits, default=None)

    def _tidy(self) -> None:
        now = time.monotonic()
        for connection in [each for each, until in self._silent.items() if until <= now]:
            self._pass_on_silent(connection)
        self._probes.tidy()
        if self._port is not None:
            self._port.tidy()

    def _accept(self) -> None:
        assert self._bound is not None
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection = accept(self._bound)
            except (BlockingIOError, ConnectionError):
                return  # The client has left, or another process took the connection.
            except OSError:  # No descriptor or no memory is left.
                self._accept_at = time.monotonic() + ACCEPT_AGAIN_S
                return
            if not self._sent(connection):
                self._silent[connection] = time.monotonic() + FIRST_BYTES_S
                self._selector.register(connection, selectors.EVENT_READ, partial(self._look, connection))
                if len(self._silent) > MAX_SILENT:
                    self._pass_on_silent(next(iter(self._silent)))

    def _look(self, connection: socket.socket) -> None:
        # A missing connection was passed to the event loop earlier in the same round of the selector.
        if connection in self._silent:
            self._forget(connection)
            if not self._sent(connection):
                self._pass_on(connection)

    def _sent(self, connection: socket.socket) -> bool:
        """Pass the connection to the probes or to the event loop, depending on its first bytes. The bytes
        stay in the socket. Returns False if no bytes have arrived.
        """
        try:
            head = peek(connection)
        except BlockingIOError:
            return False
        except OSError:
            head = b""  # The event loop notices that the client has left.
        # A probe from a web page needs CORS headers, which only the application on the event loop adds.
        if head.startswith(_LIVE) and b"\norigin:" not in head.lower():
            self._probes.adopt(connection, head)
        else:
            self._pass_on(connection)
        return True

    def _reported(self) -> Health:
        found = self._health()
        self._probed(found.is_alive)
        return found

    def _forget(self, connection: socket.socket) -> None:
        del self._silent[connection]
        self._selector.unregister(connection)

    def _pass_on_silent(self, connection: socket.socket) -> None:
        self._forget(connection)
        self._pass_on(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        self._waiting.append(connection)
        if not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._take_over)
            except RuntimeError:  # The loop is closed.
                connection.close()

    # The event loop

    def _take_over(self) -> None:
        # Reset the flag before the `while` loop. A connection that arrives during the loop then schedules
        # this method again.
        self._is_called = False
        while self._waiting:
            connection = self._waiting.popleft()
            connection.setblocking(False)
            task = self._loop.create_task(self._connected(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connected(self, connection: socket.socket) -> None:
        try:
            await self._connect(connection)
        except OSError:  # The client has left.
            connection.close()
