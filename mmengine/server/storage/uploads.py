"""Parses an upload's multipart/form-data body. The file's bytes are written to disk as they arrive. The other
fields are small and stay in memory.
"""

import logging

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mmengine.errors import InvalidRequest
from mmengine.server.storage.files import IncomingFile

MAX_FIELD_BYTES = 1024  # Maximum size of each field except the file.
MAX_FIELDS = 16
# Maximum size of a part's headers. Older versions of the parser set no limit.
MAX_HEADER_BYTES = 8192
MAX_FILENAME_CHARS = 255  # Longer names are truncated.
_TAKEN = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
# The application reports the parser's errors to the client, so the parser must not log these errors.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class Upload:
    """A parser for an upload's body.

    `content_type`: the call's Content-Type header. The caller passes the body's chunks to `feed`, then calls
    `check`. `feed` writes to disk, so the call blocks. After `check`, `fields` and `filename` are set, and
    `incoming` contains the file's bytes. Each call raises InvalidRequest for an invalid body.
    """

    def __init__(self, content_type: str, incoming: IncomingFile):
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest("the body must be multipart/form-data with a boundary")
        self.incoming = incoming
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._is_over = self._in_file = False
        self._name, self._value = "", bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._num_header_bytes = 0  # Number of header bytes of the current part.
        self._disposition = b""
        self._num_parts = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._on_header,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the boundary of the body cannot be used ({error})") from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid multipart/form-data ({error})") from None

    def check(self) -> None:
        """Raise InvalidRequest if the body is incomplete or contains no file."""
        if not self._is_over:
            raise InvalidRequest("the body ends before its last boundary; send the whole body")
        if self.filename is None:
            raise InvalidRequest("file is missing; send it as a part with a filename")

    def _part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise InvalidRequest(f"the body has more than {MAX_FIELDS} parts; send one file and its purpose")
        self._disposition, self._name, self._in_file = b"", "", False
        self._value.clear()
        self._num_header_bytes = 0

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += self._bounded(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += self._bounded(data[start:end])

    def _bounded(self, data: bytes) -> bytes:
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequest(f"the headers of a part exceed {MAX_HEADER_BYTES} bytes")
        return data

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("a part of the body has no name; send the parts file and purpose")
        self._name = options[b"name"].decode("utf-8", "replace")
        if self._name not in _TAKEN:
            raise InvalidRequest(f"unknown field {self._name[:64]}; the fields are {', '.join(_TAKEN)}")
        if self._name in self.fields or (self._name == "file" and self.filename is not None):
            raise InvalidRequest(f"the field {self._name} appears twice; send the field once")
        self._in_file = self._name == "file"
        if self._in_file:
            self.filename = _filename(options.get(b"filename", b""))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.incoming.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name} exceeds {MAX_FIELD_BYTES} bytes")

    def _part_end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_over = True


def _filename(given: bytes) -> str:
    """Return the file name without folders and without unprintable characters, truncated to
    MAX_FILENAME_CHARS.
    """
    name = given.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(each for each in name if each.isprintable())[:MAX_FILENAME_CHARS] or "upload"
