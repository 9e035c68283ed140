"""Lets the application run under any ASGI server. Streams write to a `Line` (sse.py), which only mmengine's
own server provides. This module implements a `Line` with ASGI's `send` and `receive`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmengine.server.transport.sse import LINE

FULL_BYTES = 64 * 2**10  # If more bytes are waiting, the write buffer counts as full.


class AnyServer:
    """Wraps `app`, and provides the `Line` to which the streams write."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line = _Line(receive, send)
        scope["extensions"] = {**scope.get("extensions", {}), LINE: {"line": line}}
        try:
            await self._app(scope, line.receive, line.send)
        finally:
            line.close()


class _Line:
    """A `Line` that uses the `receive` and `send` functions of a call."""

    def __init__(self, receive: Receive, send: Send):
        self._receive, self._send = receive, send
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._come, self._all_sent = asyncio.Event(), asyncio.Event()
        self._all_sent.set()
        self._tasks: list[asyncio.Task[None]] = []
        self.on_room: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self.is_gone = False

    @property
    def is_full(self) -> bool:
        return self._num_bytes > FULL_BYTES

    def write(self, data: bytes) -> None:
        if not data or self.is_gone:
            return
        if not self._tasks or self._tasks[-1].get_name() != "pump":
            self._tasks.append(asyncio.create_task(self._pump(), name="pump"))
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._all_sent.clear()
        self._come.set()

    async def _pump(self) -> None:
        while True:
            await self._come.wait()
            self._come.clear()
            while self._waiting:
                data = b"".join(self._waiting)
                self._waiting.clear()
                was_full = self.is_full
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
                self._num_bytes -= len(data)
                if was_full and not self.is_full and self.on_room is not None:
                    self.on_room()
            self._all_sent.set()

    def abort(self) -> None:
        self._gone()
        for task in self._tasks:
            task.cancel()

    def _gone(self) -> None:
        self.is_gone = True
        self._waiting.clear()
        self._all_sent.set()
        if self.on_gone is not None:
            self.on_gone()

    async def receive(self) -> Message:
        """Return the next message from the server. After the body's last message, a background task waits for
        the client to disconnect.
        """
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone()
        elif not message.get("more_body", False):
            self._tasks.insert(0, asyncio.create_task(self._watch()))
        return message

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()

    async def send(self, message: Message) -> None:
        """Send a message after all earlier writes have been sent."""
        await self._all_sent.wait()
        if not self.is_gone:
            with suppress(OSError):
                await self._send(message)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
