"""Server-sent events over ASGI: a race of the client's leaving, the next frames and silence."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from mmengine.server.errors import ApiError, ClientLeft
from mmengine.server.frames import DONE, PING, error_frame

ABORT = "mmengine.abort"  # in a scope's extensions: closes the connection without waiting for its reader
_T = TypeVar("_T")


class FrameSource(Protocol):
    """Where frames come from. `next` may be cancelled, and gives b"" at the end."""

    async def next(self) -> bytes: ...

    @property
    def backlog(self) -> int: ...

    def close(self) -> None: ...

    def leave(self) -> None:
        """As `close`, but what is not finished runs on."""


async def gone(receive: Receive) -> None:
    """Returns when the client left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[None, None, _T]) -> _T:
    """What `work` gives. It is cancelled, and ClientLeft raised, when the client leaves before. The body must
    have been read."""
    leaving, working = asyncio.ensure_future(gone(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


class EventStream:
    """An answer as an ASGI application. All frames that have come go in one write. A reader that takes longer
    than `slow_reader_s` for a write, or lets `max_backlog` news wait, is cut. `sent`: hears how many events
    were. `told`: an error as the caller is told it. `shutting_down`: the sentence for those whose stream the
    server's end cuts; the request goes on then.

    One timer looks at a stream now and then: a timeout for each wait would cost more than its frames do."""

    def __init__(
        self,
        source: FrameSource,
        first: bytes,
        headers: dict[str, str],
        *,
        ping_s: float,
        slow_reader_s: float,
        max_backlog: int,
        sent: Callable[[float], None],
        told: Callable[[Exception], ApiError],
        ended: Callable[[str], None],
        shutting_down: Callable[[], ApiError | None],
    ):
        self._source, self._first, self._headers = source, first, headers
        self._ping_s, self._slow_reader_s, self._max_backlog = ping_s, slow_reader_s, max_backlog
        self._sent, self._told, self._ended, self._shutting_down = sent, told, ended, shutting_down
        self._since = 0.0  # when the wait began that it is in: for news, or in `_writes` for its reader
        self._writes = False
        self._woken = False  # by the timer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        leaving = asyncio.ensure_future(gone(receive))
        leaving.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        self._loop, self._task = asyncio.get_running_loop(), task
        self._watch()
        how = "whole"
        try:
            await self._start(send)
            how = await self._send_all(send)
            if how == "slow reader":
                scope["extensions"][ABORT]["call"]()
        except asyncio.CancelledError:
            how = "left"
            if leaving.done():
                task.uncancel()
            elif (why := self._shutting_down()) is not None:
                how = "shutdown"
                task.uncancel()
                await send(_body(error_frame(why) + DONE, more=False))
            else:
                raise
        finally:
            self._timer.cancel()
            leaving.cancel()
            if how == "shutdown":
                self._source.leave()
            else:
                self._source.close()
            self._ended(how)

    def _watch(self) -> None:
        """Wakes the task where its wait takes too long. It is suspended in that wait whenever this runs."""
        limit = self._slow_reader_s if self._writes else self._ping_s
        if self._since and self._loop.time() - self._since >= limit:
            self._woken = True
            self._task.cancel()
        self._timer = self._loop.call_later(min(self._ping_s, self._slow_reader_s) / 4, self._watch)

    def _was_woken(self) -> bool:
        """Whether a cancellation is the timer's; it is taken back then."""
        woken, self._woken = self._woken, False
        if woken:
            self._task.uncancel()
        return woken

    async def _start(self, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx: do not collect
            **self._headers,
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_all(self, send: Send) -> str:
        """How it ended."""
        data, how = self._first, ""
        while not how:
            if not data:
                try:
                    data = await self._next()
                    how = "" if data else "whole"
                except Exception as error:
                    data, how = error_frame(self._told(error)) + DONE, "error"
            if not await self._is_read(send(_body(data, more=not how))):
                return "slow reader"
            self._sent(data.count(b"\n\n"))
            if self._source.backlog > self._max_backlog:
                return "slow reader"
            data = b""
        return how

    async def _next(self) -> bytes:
        self._since, self._writes = self._loop.time(), False
        try:
            return await self._source.next()
        except asyncio.CancelledError:
            if self._was_woken():
                return PING
            raise

    async def _is_read(self, write: Awaitable[None]) -> bool:
        self._since, self._writes = self._loop.time(), True
        try:
            await write
        except asyncio.CancelledError:
            if self._was_woken():
                return False
            raise
        return True


def _body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}
