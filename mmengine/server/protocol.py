"""uvicorn's HTTP connection, with our errors where it has its own, and a limit for headers."""

import asyncio
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mmengine.server.bodies import WHOLE
from mmengine.server.errors import ApiError
from mmengine.server.sse import LINE

_TUNNEL = b"CONNECT"
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """A connection that is an answer's Line."""

    on_room: Callable[[], None] | None = None
    on_gone: Callable[[], None] | None = None
    is_full = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LINE: {"line": self}}

    def on_headers_complete(self) -> None:
        if not self._is_read_again:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_read_again:
            self.scope["extensions"][WHOLE] = {}
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("")

    @property
    def _is_read_again(self) -> bool:
        """Whether the head asks for another protocol. A server may ignore that (RFC 9110, 7.8), the parser
        does not: it ends such a request behind its head. So that is read again, without asking."""
        return self.parser.should_upgrade() and self.parser.get_method() != _TUNNEL

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

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()

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

    def resume_writing(self) -> None:
        super().resume_writing()
        self.is_full = False
        if self.on_room is not None:
            self.on_room()


def http_protocol(max_header_bytes: int) -> type[asyncio.Protocol]:
    """A class of connections whose heads have at most so many bytes."""

    class Limited(Connection):
        _num_head_bytes = 0  # since the last request's body, or the connection's begin

        def data_received(self, data: bytes) -> None:
            self._num_head_bytes += len(data)
            super().data_received(data)
            if self._num_head_bytes > max_header_bytes and not self.transport.is_closing():
                text = f"the head of the request has more than {max_header_bytes} bytes (max_header_bytes)"
                self._refuse(ApiError(431, text))

        def on_headers_complete(self) -> None:
            self._num_head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._num_head_bytes = 0
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is no HTTP request that can be read"))

        def _refuse(self, error: ApiError) -> None:
            body = error.json()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (error.status, _REASONS[error.status], len(body), body)
            )
            self.transport.close()

    return Limited
