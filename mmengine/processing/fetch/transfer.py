"""Downloads a URL over an open connection: sends a GET, counts the bytes as they arrive, and checks the
format by the first bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import h11

from mmengine.processing.fetch.connection import Connection
from mmengine.processing.fetch.file_types import HEAD_BYTES, is_media
from mmengine.processing.fetch.refusals import FetchRefused, refused
from mmengine.processing.fetch.urls import Url
from mmengine.version import __version__

MAX_HEADER_BYTES = 2**15  # Limit for a response's bytes before the body.
# A body may arrive in at most MAX_CRUMBS pieces plus a piece per LEAST_PIECE bytes, because each piece costs
# time.
MAX_CRUMBS, LEAST_PIECE = 2048, 128
# Names the supported formats for hosts that convert images on request.
_ACCEPT = "image/png, image/jpeg, image/webp, image/gif, image/bmp, image/tiff, video/*, */*;q=0.1"
_REDIRECTS = (301, 302, 303, 307, 308)


class Redirect(NamedTuple):
    location: str


def get(
    url: Url, connection: Connection, max_bytes: int, count_bytes: Callable[[int], None]
) -> bytes | Redirect:
    """Send a GET and return the response's body, or a redirect.

    `connection`: a connection to the host of the URL. `count_bytes`: called with the number of new bytes
    whenever bytes arrive; may raise. Raises FetchRefused, AttemptOver.
    """
    try:
        return _Exchange(connection, max_bytes, count_bytes).run(url)
    except h11.ProtocolError:
        raise refused("protocol") from None


class _Exchange:
    def __init__(self, connection: Connection, max_bytes: int, count_bytes: Callable[[int], None]) -> None:
        self._connection, self._max_bytes, self._count_bytes = connection, max_bytes, count_bytes
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._received = 0

    def run(self, url: Url) -> bytes | Redirect:
        headers = [
            ("Host", url.authority),
            ("User-Agent", f"mmengine/{__version__}"),
            ("Accept", _ACCEPT),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        request = self._http.send(h11.Request(method="GET", target=url.target, headers=headers))
        self._connection.send(
            b"".join(part for part in (request, self._http.send(h11.EndOfMessage())) if part)
        )
        while isinstance(head := self._event(), h11.InformationalResponse):
            if self._received > MAX_HEADER_BYTES:
                raise refused("protocol")
        if not isinstance(head, h11.Response):
            raise refused("protocol")
        return self._checked(head) or self._body()

    def _event(self) -> object:
        """Return h11's next event. h11 limits the size of headers and trailers."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = self._connection.receive()
            self._received += len(data)
            self._http.receive_data(data)
        return event

    def _checked(self, head: h11.Response) -> Redirect | None:
        named: dict[str, str] = {}
        for raw_name, raw_value in head.headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1").strip()
            named[name] = f"{named[name]}, {value}" if name == "content-encoding" and name in named else value
        if head.status_code in _REDIRECTS and "location" in named:
            return Redirect(_text(named["location"]))
        if head.status_code != 200:
            raise refused("status", f"HTTP status {head.status_code}")
        if named.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise refused("encoding")
        if named.get("content-length", "").isdecimal() and int(named["content-length"]) > self._max_bytes:
            raise self._too_large()
        return None

    def _body(self) -> bytes:
        body, is_known, num_pieces = bytearray(), False, 0
        while isinstance(event := self._event(), h11.Data):
            body += event.data
            num_pieces += 1
            if num_pieces > MAX_CRUMBS + len(body) // LEAST_PIECE:
                raise refused("protocol")
            self._count_bytes(len(event.data))
            if len(body) > self._max_bytes:
                raise self._too_large()
            if not is_known and len(body) >= HEAD_BYTES:
                is_known = _check_kind(body)
        if not isinstance(event, h11.EndOfMessage):
            raise refused("protocol")
        if not is_known:
            _check_kind(body)
        return bytes(body)

    def _too_large(self) -> FetchRefused:
        return refused("size", f"more than {self._max_bytes} bytes")


def _check_kind(body: bytearray) -> bool:
    if not is_media(bytes(body[:HEAD_BYTES])):
        raise refused("type")
    return True


def _text(location: str) -> str:
    """Decode a Location header as UTF-8 if it is valid UTF-8, as browsers do."""
    try:
        return location.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return location
