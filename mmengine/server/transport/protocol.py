"""uvicorn's HTTP connection, with our errors where it has its own, and limits for what it waits for."""

import asyncio
from collections.abc import Callable
from typing import TypeGuard

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mmengine.errors import ErrorCode
from mmengine.server.http.body_reader import WHOLE
from mmengine.server.http.errors import ApiError
from mmengine.server.settings import ServerSettings
from mmengine.server.transport.open_files import most_connections
from mmengine.server.transport.sse import LINE

_TUNNEL = b"CONNECT"
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_PIECE = 2**16  # bytes of a whole answer that are taken within slow_reader_s


class Connection(HttpToolsProtocol):
    """A connection that is an answer's Line, within the `limits` of its server, which has `most` at once.
    `idle`: those of the server that have no request, the longest first."""

    limits: ServerSettings
    most: int
    idle: dict["Connection", None]
    on_room: Callable[[], None] | None = None
    on_gone: Callable[[], None] | None = None
    is_full = False
    _num_head_bytes = 0  # since the last request's body, or the connection's begin
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread = 0  # bytes that waited for the reader when it was last looked at

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert _has_both_ways(transport)
        super().connection_made(transport)
        self.idle[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if len(self.connections) > self.most:
            longest = next(iter(self.idle))  # this one, where all others have a request
            del self.idle[longest]
            longest.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        self._unset_keepalive_if_required()
        self._unwatch_head()
        self._unwatch_reader()
        if self.on_gone is not None:
            self.on_gone()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_head_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self._refuse(ApiError(ErrorCode.INVALID_VALUE, "this is no HTTP request that can be read"))
        most = self.limits.max_header_bytes
        if self.transport.is_closing():
            return
        if self._num_head_bytes > most:
            text = f"the head of the request has more than {most} bytes (max_header_bytes)"
            self._refuse(ApiError(ErrorCode.HEAD_TOO_LARGE, text))
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._head_timer = self.loop.call_later(self.limits.body_timeout_s, self._give_head_up)

    def _give_head_up(self) -> None:
        """From the first byte on, however many come."""
        if not self._num_head_bytes:  # but the rest of a body that was answered before its end
            self.timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            seconds = self.limits.body_timeout_s
            self._refuse(
                ApiError(
                    ErrorCode.BODY_TIMEOUT,
                    f"the head did not come within {seconds:g} seconds (body_timeout_s)",
                )
            )

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _parse(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_read_again:
                    return  # what is behind it is for the end of a tunnel, and there is none
                data, head = data[upgrade.args[0] :], self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)  # for the old one the connection may be over
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as that had
                self.parser.feed_data(head)

    @property
    def _is_read_again(self) -> bool:
        """Whether the head asks for another protocol. A server may ignore that (RFC 9110, 7.8), the parser
        does not: it ends such a request behind its head. So that is read again, without asking."""
        return self.parser.should_upgrade() and self.parser.get_method() != _TUNNEL

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LINE: {"line": self}}

    def on_headers_complete(self) -> None:
        if not self._is_read_again:
            self._num_head_bytes = 0
            self.idle.pop(self, None)
            self._unwatch_head()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_read_again:
            self.scope["extensions"][WHOLE] = {}
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_with_reader()
        elif self.timeout_keep_alive_task is not None:  # no request waits behind this one
            self.idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_with_reader()

    def _refuse(self, error: ApiError) -> None:
        body = error.json()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (error.status, _REASONS[error.status], len(body), body)
        )
        self.transport.close()
        self._end_with_reader()

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    def write(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_full = False
        if not self.transport.is_closing():
            self._unwatch_reader()
        if self.on_room is not None:
            self.on_room()

    def _end_with_reader(self) -> None:
        """A connection that was closed stays as long as something waits for its reader."""
        if self._reader_timer is None and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _watch_reader(self) -> None:
        self._unwatch_reader()
        self._unread = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(self.limits.slow_reader_s, self._look_at_reader)

    def _unwatch_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self) -> None:
        num_taken = self._unread - self.transport.get_write_buffer_size()
        if num_taken < _PIECE and self.on_room is None:  # a stream looks after its reader itself
            self.transport.abort()
        else:
            self._watch_reader()


def _has_both_ways(transport: asyncio.BaseTransport) -> TypeGuard[asyncio.Transport]:
    """uvloop's are no asyncio.Transport by their class."""
    return hasattr(transport, "write") and hasattr(transport, "pause_reading")


def http_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """A class of connections within these limits."""

    class Limited(Connection):
        limits, most, idle = settings, most_connections(), {}

    return Limited
