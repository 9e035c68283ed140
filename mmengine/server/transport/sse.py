"""Sends server-sent events over ASGI. Frames are written to the socket as they arrive, without an `await` per
frame.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from mmengine.server.http.errors import ApiError, ClientLeft

LINE = "mmengine.line"  # Key in the extensions of an ASGI scope. The value is {"line": Line}.
PING = b": ping\n\n"


class Line(Protocol):
    """The connection to which a response is written. `on_room` is called when the write buffer is no longer
    full, and `on_gone` when the client disconnects.
    """

    on_room: Callable[[], None] | None
    on_gone: Callable[[], None] | None
    is_full: bool  # Whether the write buffer is full, because the client reads slowly.

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected."""

    def write(self, data: bytes) -> None:
        """Write a part of the body without waiting."""

    def abort(self) -> None:
        """Close the connection immediately. Bytes that the client has not read are lost."""


class FrameSource(Protocol):
    """Supplies a stream's frames.

    `take` returns the new frames and the stream's state. The state is "" while the stream continues, and
    "whole" or "error" at its end. The argument `to_api_error` converts an exception to the error that the
    client receives. `has_more`: whether `take` would return more frames now.
    """

    def take(self, to_api_error: Callable[[Exception], ApiError]) -> tuple[bytes, str]: ...

    def error_frames(self, error: ApiError) -> bytes:
        """Return the last frames for a stream that ends with this error."""

    def listen(self, listener: Callable[[], None] | None) -> None: ...

    @property
    def backlog(self) -> int: ...

    @property
    def has_more(self) -> bool: ...

    def close(self) -> None: ...

    def leave(self) -> None:
        """Close the source, but let unfinished requests continue."""


@contextmanager
def unless_gone(scope: Scope) -> Iterator[None]:
    """Cancel the `with` block and raise ClientLeft if the client disconnects. The request's body must already
    have been read.
    """
    line: Line = scope["extensions"][LINE]["line"]
    if line.is_gone:
        raise ClientLeft
    left, task = False, asyncio.current_task()

    def leave() -> None:
        nonlocal left
        if task is not None:
            left = task.cancel()

    line.on_gone = leave
    try:
        yield
    except asyncio.CancelledError:
        # If `uncancel` returns a number above 0, the server's shutdown has cancelled the task too.
        if left and task is not None and not task.uncancel():
            raise ClientLeft from None
        raise
    finally:
        line.on_gone = None


class EventStream:
    """An ASGI application that sends an answer as a stream of events.

    The source's listener writes all new frames in a single call. The stream's task wakes up only when the
    stream ends. A slow client is disconnected if the write buffer is full for `slow_reader_s` seconds, or if
    more than `max_backlog` outputs are waiting.

    `sent` is called with the number of written events. `to_api_error` converts an exception to the error that
    the client receives. `ended` is called with the reason for the stream's end. If the stream's task is
    cancelled, `interrupted` returns a reason and the error for the client, or None if the server did not
    interrupt the stream. After the reason "shutdown", the request continues.
    """

    def __init__(
        self,
        source: FrameSource,
        first: bytes,
        headers: dict[str, str],
        *,
        ping_s: float,
        slow_reader_s: float,
        max_backlog: int,
        sent: Callable[[int], None],
        to_api_error: Callable[[Exception], ApiError],
        ended: Callable[[str], None],
        interrupted: Callable[[], tuple[str, ApiError] | None],
    ):
        self._source, self._first, self._headers = source, first, headers
        self._ping_s, self._slow_reader_s, self._max_backlog = ping_s, slow_reader_s, max_backlog
        self._sent, self._to_api_error, self._ended, self._interrupted = (
            sent,
            to_api_error,
            ended,
            interrupted,
        )
        self._last = b""  # The last frames, which are sent together with the end of the body.
        self._how = ""  # Why the stream ended; "" while the stream continues.
        self._written_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._line: Line = scope["extensions"][LINE]["line"]
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._watch()
        try:
            self._line.on_gone = partial(self._end, "left")
            if self._line.is_gone:
                self._end("left")
            await self._start(send)
            # For HEAD, the server omits the body, but would send frames that are written directly to the
            # connection.
            if scope["method"] == "HEAD":
                self._end("whole")
            else:
                self._write(self._first)
                self._line.on_room = self._pump
                self._source.listen(self._pump)
                self._pump()
            await self._over
            await self._finish(send)
        except asyncio.CancelledError:
            if (found := self._interrupted()) is None:
                self._how = self._how or "left"
                raise
            if not self._how:
                self._how, self._last = found[0], self._source.error_frames(found[1])
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await self._finish(send)
        finally:
            self._timer.cancel()
            self._line.on_room = self._line.on_gone = None
            self._source.listen(None)
            if self._how == "shutdown":
                self._source.leave()
            else:
                self._source.close()
            self._ended(self._how)

    def _pump(self) -> None:
        """Write new frames. Called when output arrives, and when the write buffer is no longer full."""
        if self._how:
            return
        if self._line.is_full:
            if self._source.backlog > self._max_backlog:
                self._cut()
            return
        data, how = self._source.take(self._to_api_error)
        if how:
            self._last = data
            self._end(how)
            return
        if data:
            self._write(data)
        if self._source.has_more:
            self._loop.call_soon(self._pump)  # Lets other tasks run first.

    def _write(self, data: bytes) -> None:
        self._written_at = self._loop.time()
        self._line.write(data)
        self._sent(data.count(b"\n\n"))

    async def _finish(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._last, "more_body": False})
        self._sent(self._last.count(b"\n\n"))

    def _end(self, how: str) -> None:
        self._how = self._how or how
        if not self._over.done():
            self._over.set_result(None)

    def _cut(self) -> None:
        self._end("slow reader")
        self._line.abort()

    def _watch(self) -> None:
        """Disconnect a client that reads slowly, send a ping after silence, and set the timer for the next
        check.
        """
        now = self._loop.time()
        if self._line.is_full:
            if now - self._written_at >= self._slow_reader_s:
                self._cut()
        elif self._written_at and now - self._written_at >= self._ping_s and not self._how:
            self._write(PING)
        self._timer = self._loop.call_later(min(self._ping_s, self._slow_reader_s) / 4, self._watch)

    async def _start(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # Tells nginx not to buffer.
            **self._headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
