"""A uvicorn server with a two-stage shutdown. Health probes get a response even while the event loop is
busy.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from mmengine.server.app.app import App
from mmengine.server.http.admission import Admission
from mmengine.server.http.cors import with_cors
from mmengine.server.lifecycle.acceptor import Acceptor
from mmengine.server.lifecycle.health_port import Health, reported, silent
from mmengine.server.lifecycle.heartbeat import BEAT_S, LATE_S, STUCK_S
from mmengine.server.lifecycle.process_end import drain_text
from mmengine.server.lifecycle.tls import tls_options
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.protocol import http_protocol

LAST_WORDS_S = 1.0  # Seconds at shutdown in which the last errors are sent to clients.


class LoopClock:
    """Records when the event loop last ran, and whether the server was ready at that time. Other threads may
    call `health`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, admission: Admission):
        self._loop, self._admission = loop, admission
        self._beat()

    def _beat(self) -> None:
        admission = self._admission
        self._health = reported(admission.reasons(), admission.retry_later_s(), admission.is_frozen)
        self.beaten_at = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    def health(self) -> Health:
        """Return the state for health probes. The server is not alive if its event loop has been stuck for
        STUCK_S seconds, or if an engine step hangs (`Admission.is_frozen`).
        """
        late = silent(time.monotonic() - self.beaten_at, LATE_S, STUCK_S)
        return late or self._health


class WebServer(uvicorn.Server):
    """A uvicorn server with a two-stage shutdown.

    After the first signal, open streams may continue for drain_s seconds. A second signal ends the server
    immediately. Unfinished requests stay in the log, and their clients get an error that says so.
    """

    def __init__(self, config: uvicorn.Config, app: App, health_socket: socket.socket | None):
        super().__init__(config)
        self._app, self._health_socket = app, health_socket
        self.on_exit: Callable[[], None] = lambda: None  # Called at the first signal.
        # The loop and the sockets are set when the server starts.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: list[socket.socket] = []
        self._acceptor: Acceptor | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on a single socket. Without TLS, the acceptor's thread accepts the connections and peeks at
        their first bytes. With TLS, only the event loop can decrypt these bytes, so the event loop accepts
        the connections.
        """
        loop, self._sockets = asyncio.get_running_loop(), sockets or []
        self._loop, tls = loop, self.config.ssl is not None
        await super().startup(sockets if tls else [])
        protocol_class: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        protocol = partial(
            protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self._acceptor = Acceptor(
            None if tls else self._sockets[0],
            lambda connection: loop.connect_accepted_socket(protocol, connection),
            LoopClock(loop, self._app.admission).health,
            self._app.count_probe,
            self._health_socket,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        if not self.should_exit:
            self.on_exit()
            if running := len(self.server_state.tasks):
                drain_s = self.config.timeout_graceful_shutdown or 0
                os.write(2, drain_text(running, drain_s, sig).encode())  # `print` could deadlock here.
        self.should_exit = self._app.admission.is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_no_more)

    def _take_no_more(self) -> None:
        """Close the listening sockets.

        Another process with the same socket then serves new clients. Clients with an open connection can send
        calls until `shutdown` begins, up to 0.1 s later.
        """
        for server in (self._acceptor, *self.servers):
            if server is not None:
                server.close()
        for each in self._sockets:
            each.close()
        self._app.close_pages()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.admission.is_draining = True
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)
        waiting = set(self.server_state.tasks)
        if self.force_exit:  # Otherwise, uvicorn already cancelled the calls when drain_s ended.
            for task in waiting:
                task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_WORDS_S)


def web_server(app: App, settings: ServerSettings, health_socket: socket.socket | None = None) -> WebServer:
    """Return a uvicorn server for the application. `health_socket`: the listening socket of a health port."""
    config = uvicorn.Config(
        with_cors(app, settings.cors_origins),
        http=http_protocol(settings),
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=settings.max_connections,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.drain_s,
        **tls_options(settings),
    )
    return WebServer(config, app, health_socket)
