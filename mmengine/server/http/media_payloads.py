"""Removes base64 images, video and audio from a body before the body is parsed. The parser holds the
interpreter lock, so parsing a large body would stop the event loop.

Base64 text in data: URLs or in fields named data is decoded in short steps. A random placeholder replaces
each text. If the reader does not use every placeholder as media, the unchanged body is parsed instead.
"""

import binascii
import re
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from mmengine.errors import FieldPath

MIN_CHARS = 2**15  # Shorter base64 texts stay in the body.
FILE_ID = re.compile(r"file-[0-9a-f]{24}")  # The id of an uploaded file.
CUT_CHARS = 2**12  # Base64 characters that `cut_short` keeps.
PIECE = 2**15  # Characters that a step decodes; 4 characters give 3 bytes.
_LOOKED_THROUGH = 2**20  # Bytes that are searched in each step.
_BEGIN, _HEAD, _END = b'"data:', b";base64,", b'"'
_MAX_HEAD = 128  # Maximum number of bytes from the URL's start to its data.
_MAX_HEADS = 4096  # Maximum number of URL heads that are examined.
_FIELD = b'"data"'
_VALUE = re.compile(rb'\s*:\s*"')
_T = TypeVar("_T")
_Places = Callable[[bytes], Iterator[tuple[int, int]]]


class UploadReference(NamedTuple):
    """A message's reference to an uploaded file.

    `part`: the message part, whose `url` is replaced by the file's bytes. `where`: the reference's path in
    the body.
    """

    part: dict[str, object]
    file_id: str
    where: FieldPath


class MediaPayloads:
    """The decoded media that were removed from a body."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(16)
        self._data: dict[str, bytes] = {}
        self._used: set[str] = set()

    def add(self, data: bytes) -> bytes:
        """Store `data`, and return the placeholder that replaces it in the body."""
        word = f"{self._word}{len(self._data)}"
        self._data[word] = data
        return word.encode()

    def of(self, url: str) -> bytes | None:
        """Return the data for the placeholder in `url`, or None if `url` has no placeholder."""
        word = url.rpartition(",")[2] if self._data else ""
        if word not in self._data:
            return None
        self._used.add(word)
        return self._data[word]

    @property
    def are_all_used(self) -> bool:
        return len(self._used) == len(self._data)


NO_PAYLOADS = MediaPayloads()


def in_urls(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each base64 text in a data: URL, if it has at least MIN_CHARS characters."""
    at = 0
    for _ in range(_MAX_HEADS):
        if (head := find(body, _HEAD, at)) < 0:
            return
        start = head + len(_HEAD)
        begin = body.rfind(_BEGIN, max(at, head - _MAX_HEAD), head)
        kind = body[begin + len(_BEGIN) : head]
        at = start
        if begin < 0 or _is_escaped(body, begin) or any(each in kind for each in b'",\\'):
            continue
        end = find(body, _END, start)
        if end < 0:
            return
        at = end
        if end - start >= MIN_CHARS:
            yield start, end


def in_data_fields(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each string in a field `data`, if it has at least MIN_CHARS characters."""
    at = 0
    for _ in range(_MAX_HEADS):
        if (key := find(body, _FIELD, at)) < 0:
            return
        at = key + len(_FIELD)
        value = _VALUE.match(body, at, at + _MAX_HEAD)
        if value is None or _is_escaped(body, key):
            continue
        at = find(body, _END, value.end())
        if at < 0:
            return
        if at - value.end() >= MIN_CHARS:
            yield value.end(), at


def read_without_payloads(
    body: bytes, read: Callable[[bytes, MediaPayloads], _T], places: _Places = in_urls
) -> _T:
    """Return the result of `read(body without media, media)`.

    If `read` did not use all media, call `read` again with the unchanged body. `places` yields the start and
    end of each base64 text.
    """
    small, payloads = take_out(body, places) if len(body) > MIN_CHARS else (body, NO_PAYLOADS)
    result = read(small, payloads)
    return result if payloads.are_all_used else read(body, NO_PAYLOADS)


def take_out(body: bytes, places: _Places = in_urls) -> tuple[bytes, MediaPayloads]:
    """Return the body without its media, and the media.

    For a large body, call this function on a thread: it releases the interpreter lock between short steps.
    """
    payloads, parts, done = MediaPayloads(), list[bytes](), 0
    for start, end in places(body):
        if (data := _decoded(body, start, end)) is not None:
            parts += (body[done:start], payloads.add(data))
            done = end
    return (b"".join((*parts, body[done:])) if parts else body), payloads


def cut_short(body: bytes) -> bytes:
    """Return the body with long base64 texts in data: URLs truncated to CUT_CHARS, for checks on its other
    fields.
    """
    parts, done = list[bytes](), 0
    for start, end in in_urls(body):
        parts.append(body[done : start + CUT_CHARS])
        done = end
    return b"".join((*parts, body[done:])) if parts else body


def _is_escaped(body: bytes, at: int) -> bool:
    """Whether the quote at `at` is escaped, so that it neither begins nor ends a string."""
    before = body[max(0, at - _MAX_HEAD) : at]
    count = len(before) - len(before.rstrip(b"\\"))
    return count % 2 == 1 or count == _MAX_HEAD


def find(body: bytes, what: bytes, at: int, end: int | None = None) -> int:
    """Return the first position of `what` in body[at:end], or -1. Searches in short steps."""
    end = len(body) if end is None else end
    for start in range(at, end, _LOOKED_THROUGH):
        found = body.find(what, start, min(end, start + _LOOKED_THROUGH + len(what) - 1))
        if found >= 0:
            return found
    return -1


def _decoded(body: bytes, start: int, end: int) -> bytes | None:
    """Return the decoded base64 text, or None if the text is invalid. Invalid base64 stays in the body, so
    that the reader reports the error.
    """
    pieces = []
    try:
        for at in range(start, end, PIECE):
            piece = binascii.a2b_base64(body[at : min(at + PIECE, end)], strict_mode=True)
            if len(piece) != PIECE // 4 * 3 and at + PIECE < end:
                return None
            pieces.append(piece)
    except binascii.Error:
        return None
    return b"".join(pieces)
