"""Media in a body, taken out of it before it is parsed: a parser keeps the interpreter, and so the event
loop, for as long as what it parses is large.

What is taken out is base64 of data: URLs, or of the field data, decoded piece by piece; a word that nobody
can guess stays in its place. Whoever finds that word where no media stand parses the whole body instead.
"""

import binascii
import re
import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from mmengine.errors import FieldPath

MIN_CHARS = 2**15  # of base64 that is taken out
FILE_ID = re.compile(r"file-[0-9a-f]{24}")  # of an uploaded file
CUT_CHARS = 2**12  # that `cut_short` leaves of it
PIECE = 2**15  # characters that are decoded at once; four of them are three bytes
_LOOKED_THROUGH = 2**20  # bytes in one search
_BEGIN, _HEAD, _END = b'"data:', b";base64,", b'"'
_MAX_HEAD = 128  # bytes from the one to the other
_MAX_HEADS = 4096  # that are looked at
_FIELD = b'"data"'
_VALUE = re.compile(rb'\s*:\s*"')
_T = TypeVar("_T")
_Places = Callable[[bytes], Iterator[tuple[int, int]]]


class UploadReference(NamedTuple):
    """A file that a message names by its id. `part`: where its bytes take the place of the `url`. `where`: in
    the body."""

    part: dict[str, object]
    file_id: str
    where: FieldPath


class MediaPayloads:
    """Those of one body."""

    def __init__(self) -> None:
        self._word = secrets.token_hex(16)
        self._data: dict[str, bytes] = {}
        self._used: set[str] = set()

    def add(self, data: bytes) -> bytes:
        """Gives the word that stands for it."""
        word = f"{self._word}{len(self._data)}"
        self._data[word] = data
        return word.encode()

    def of(self, url: str) -> bytes | None:
        """The data of a URL of media; None where it still has them itself."""
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
    """Where base64 begins and ends that is the rest of a JSON string, behind the head of a data: URL."""
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
    """Where the strings begin and end that are values of fields `data`."""
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
    """What `read` makes of the body without its payloads, and of these; of the whole body where it did not
    find all of them. `places`: where they are."""
    small, payloads = take_out(body, places) if len(body) > MIN_CHARS else (body, NO_PAYLOADS)
    made = read(small, payloads)
    return made if payloads.are_all_used else read(body, NO_PAYLOADS)


def take_out(body: bytes, places: _Places = in_urls) -> tuple[bytes, MediaPayloads]:
    """The body without its payloads, and these. On a thread: all of it takes long, no part of it does."""
    payloads, parts, done = MediaPayloads(), list[bytes](), 0
    for start, end in places(body):
        if (data := _decoded(body, start, end)) is not None:
            parts += (body[done:start], payloads.add(data))
            done = end
    return (b"".join((*parts, body[done:])) if parts else body), payloads


def cut_short(body: bytes) -> bytes:
    """The body with only the first characters of what `take_out` would take out: enough to see what else is
    in it, and that a text is too long."""
    parts, done = list[bytes](), 0
    for start, end in in_urls(body):
        parts.append(body[done : start + CUT_CHARS])
        done = end
    return b"".join((*parts, body[done:])) if parts else body


def _is_escaped(body: bytes, at: int) -> bool:
    """Whether a quote belongs to a string, and begins or ends none."""
    before = body[max(0, at - _MAX_HEAD) : at]
    count = len(before) - len(before.rstrip(b"\\"))
    return count % 2 == 1 or count == _MAX_HEAD


def find(body: bytes, what: bytes, at: int, end: int | None = None) -> int:
    """Where it stands from `at` on, or -1; looked for piece by piece."""
    end = len(body) if end is None else end
    for start in range(at, end, _LOOKED_THROUGH):
        found = body.find(what, start, min(end, start + _LOOKED_THROUGH + len(what) - 1))
        if found >= 0:
            return found
    return -1


def _decoded(body: bytes, start: int, end: int) -> bytes | None:
    """None for what is no plain base64: that stays where it is, for whoever says what is wrong with it."""
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
