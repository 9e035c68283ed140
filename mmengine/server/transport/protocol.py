"""Extends uvicorn's HTTP connection with the API's error bodies and with time limits for slow clients."""

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
_FIELD_BYTES = len(b": \r\n")  # Bytes of a header line besides name and value.
_PIECE = 2**16  # A client must read this many bytes in each period of slow_reader_s.


class Connection(HttpToolsProtocol):
    """An HTTP connection. For the response, the object also implements `Line` (sse.py). `limits`: the
    server's settings. `most`: maximum number of connections. `idle`: all connections without a request,
    longest idle first.
    """

    limits: ServerSettings
    most: int
    idle: dict["Connection", None]
    on_room: Callable[[], None] | None = None
    on_gone: Callable[[], None] | None = None
    is_full = False
    # Bytes received since the last request's body, or since the start of the connection.
    _num_head_bytes = 0
    # Parsed bytes of the current request target, header fields and trailers.
    _num_field_bytes = 0
    _is_head_complete = False
    _head_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread = 0  # Bytes in the write buffer at the last check.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert _has_both_ways(transport)
        super().connection_made(transport)
        self.idle[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if len(self.connections) > self.most:
            # If no other connection is idle, this closes the new connection.
            longest = next(iter(self.idle))
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
        except httptools.HttpParserError as error:
            cause = error.__context__  # The exception that a callback raised.
            invalid = ApiError(ErrorCode.INVALID_VALUE, "the bytes are not a valid HTTP request")
            self._refuse(cause if isinstance(cause, ApiError) else invalid)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > self.limits.max_header_bytes:
            self._refuse(self._head_too_large())
        elif self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._head_timer = self.loop.call_later(self.limits.body_timeout_s, self._give_head_up)

    def _head_too_large(self) -> ApiError:
        text = f"the request's head exceeds {self.limits.max_header_bytes} bytes (max_header_bytes)"
        return ApiError(ErrorCode.HEAD_TOO_LARGE, text)

    def _give_head_up(self) -> None:
        """Refuse the request and close the connection: the head did not arrive within body_timeout_s."""
        # No head has begun: the bytes that started the timer belonged to an earlier request's body.
        if not self._num_head_bytes:
            self.timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            seconds = self.limits.body_timeout_s
            self._refuse(
                ApiError(
                    ErrorCode.BODY_TIMEOUT,
                    f"the request's head did not arrive within {seconds:g} seconds (body_timeout_s)",
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
                    return  # The remaining bytes belong to a tunnel, which is unsupported.
                data, head = data[upgrade.args[0] :], self._head_without_upgrade()
                # The old parser may consider the connection closed.
                self.parser = httptools.HttpRequestParser(self)
                # uvicorn sets the same leniency for its parser.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    @property
    def _is_read_again(self) -> bool:
        """Whether the head must be parsed again without the header `Upgrade`. A server may ignore `Upgrade`
        (RFC 9110, 7.8), but the parser does not read the body after an `Upgrade`.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != _TUNNEL

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_field_bytes, self._is_head_complete = 0, False
        self.scope["extensions"] = {LINE: {"line": self}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._num_field_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header field. Trailers count towards the limit but are dropped: a trailer could replace a
        field that a proxy has checked (RFC 9110, 6.5.1). Raises ApiError if the trailers are too large.
        """
        self._num_field_bytes += len(name) + len(value) + _FIELD_BYTES
        if not self._is_head_complete:
            super().on_header(name, value)
        elif self._num_field_bytes > self.limits.max_header_bytes:
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        """Start the request. Raises ApiError if the head is too large."""
        if self._num_field_bytes > self.limits.max_header_bytes:
            raise self._head_too_large()
        if not self._is_read_again:
            self._num_head_bytes, self._is_head_complete = 0, True
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
        elif self.timeout_keep_alive_task is not None:  # No pipelined request is waiting.
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
        """Start the slow reader's timer, if a closing connection has unread bytes."""
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
        if num_taken < _PIECE and self.on_room is None:  # Event streams have their own timer.
            self.transport.abort()
        else:
            self._watch_reader()


def _has_both_ways(transport: asyncio.BaseTransport) -> TypeGuard[asyncio.Transport]:
    """Return whether the transport can read and write. uvloop's transports are not subclasses of
    asyncio.Transport, so the methods are checked.
    """
    return hasattr(transport, "write") and hasattr(transport, "pause_reading")


def http_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Return a connection class with the limits in `settings`."""

    class Limited(Connection):
        limits, most, idle = settings, most_connections(), {}

    return Limited
