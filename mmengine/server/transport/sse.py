"""Server-sent events over ASGI: frames go to the socket when they come, without a task for each."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from mmengine.server.http.errors import ApiError, ClientLeft

LINE = "mmengine.line"  # in a scope's extensions: {"line": Line}
PING = b": ping\n\n"


class Line(Protocol):
    """The connection under an answer. `on_room`: called when it is full no more, `on_gone`: when the client
    leaves."""

    on_room: Callable[[], None] | None
    on_gone: Callable[[], None] | None
    is_full: bool  # its reader is slow: what is written waits in memory

    @property
    def is_gone(self) -> bool:
        """Whether the client left."""

    def write(self, data: bytes) -> None:
        """A part of the body, at once."""

    def abort(self) -> None:
        """Close it without waiting for its reader."""


class FrameSource(Protocol):
    """Where frames come from. `take` gives those of what has come, with a word at their end; `has_more`: some
    are left for another call. `told`: an error as the caller is told it."""

    def take(self, told: Callable[[Exception], ApiError]) -> tuple[bytes, str]: ...

    def broken_off(self, error: ApiError) -> bytes:
        """The last frames, where the server ends before the answer."""

    def listen(self, listener: Callable[[], None] | None) -> None: ...

    @property
    def backlog(self) -> int: ...

    @property
    def has_more(self) -> bool: ...

    def close(self) -> None: ...

    def leave(self) -> None:
        """As `close`, but what is not finished runs on."""


@contextmanager
def unless_gone(scope: Scope) -> Iterator[None]:
    """What is awaited in it is cancelled, and ClientLeft raised, when the client leaves before. The body must
    have been read."""
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
        if left and task is not None and not task.uncancel():  # else the server ends, too
            raise ClientLeft from None
        raise
    finally:
        line.on_gone = None


class EventStream:
    """An answer as an ASGI application. All frames that have come go in one write by whoever brings news:
    a task is woken for the end alone. A reader that keeps the line full for longer than `slow_reader_s`, or
    lets `max_backlog` news wait, is cut. `sent`: hears how many events were. `told`: an error as the caller
    is told it. `shutting_down`: the sentence for those whose stream the server's end cuts; the request goes
    on then."""

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
        told: Callable[[Exception], ApiError],
        ended: Callable[[str], None],
        shutting_down: Callable[[], ApiError | None],
    ):
        self._source, self._first, self._headers = source, first, headers
        self._ping_s, self._slow_reader_s, self._max_backlog = ping_s, slow_reader_s, max_backlog
        self._sent, self._told, self._ended, self._shutting_down = sent, told, ended, shutting_down
        self._last = b""  # frames that go with the end
        self._how = ""  # it ended
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
            if scope["method"] == "HEAD":  # whose body the server leaves out, but not what goes by the line
                self._end("whole")
            else:
                self._write(self._first)
                self._line.on_room = self._pump
                self._source.listen(self._pump)
                self._pump()
            await self._over
            await self._finish(send)
        except asyncio.CancelledError:
            if (why := self._shutting_down()) is None:
                self._how = self._how or "left"
                raise
            if not self._how:
                self._how, self._last = "shutdown", self._source.broken_off(why)
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
        """News have come, or room for them."""
        if self._how:
            return
        if self._line.is_full:
            if self._source.backlog > self._max_backlog:
                self._cut()
            return
        data, how = self._source.take(self._told)
        if how:
            self._last = data
            self._end(how)
            return
        if data:
            self._write(data)
        if self._source.has_more:
            self._loop.call_soon(self._pump)  # others first

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
        """One timer looks at a stream now and then: for its reader, and for silence."""
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
            "x-accel-buffering": "no",  # nginx: do not collect
            **self._headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
