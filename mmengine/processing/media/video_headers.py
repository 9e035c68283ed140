"""Video containers, bounded before FFmpeg sees them.

Its demuxers keep titles in lists that are searched for each new one, sort index entries in one by one,
and make the samples of a table that says them in three numbers: a few megabytes take minutes and
gigabytes. Looked at are the tables that do so; what is cut short is left to the demuxer.
"""

import os
import struct
from contextlib import suppress
from typing import BinaryIO

from mmengine.processing.media.tiff_headers import HeaderError

MAX_BOXES = 2**17  # of an MP4; a fragment has nine
MAX_DEPTH = 12
MAX_TRACKS = 64
MAX_SAMPLES = 2**22  # of all tracks: ten hours of film with sound have nearly three millions
MAX_EDITED_SAMPLES = 2**22  # edits times samples
MAX_FRAGMENTS = 2**15
MAX_TITLES = 1024
MAX_TITLE_BYTES = 2**16
MAX_CUES = 2**16  # of a Matroska file's index
MAX_ELEMENTS = 2**19  # a cluster is one, where its size is known
MAX_TABLE_BYTES = 2**20  # of a fragments' index
_PLAIN = "; write it anew with a common tool, without what is not picture"
_INSIDE = frozenset(b"moov trak mdia minf stbl edts moof traf mvex udta meta ilst".split())
_UNREAD = {b"cmov": "a packed header", b"iloc": "a still picture"}
_TITLES = (b"udta", b"meta", b"ilst")


def container_of(file: BinaryIO) -> str | None:
    """FFmpeg's name of the demuxer, None where its bytes do not say. Raises HeaderError: why the file is
    refused. `file` may stand anywhere afterwards."""
    file.seek(0)
    head = file.read(12)
    size = file.seek(0, os.SEEK_END)
    with suppress(struct.error, IndexError):  # cut short: the demuxer says so
        if head.startswith(b"\x1a\x45\xdf\xa3"):
            _Matroska(file).check(size)
        elif head.startswith(b"RIFF") and head[8:] == b"AVI ":
            _check_avi(file, 12, size, _Counts())
        elif head[4:8] in _FIRST_BOXES:
            _Mp4(file).check(size)
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:] == b"AVI ":
        return "avi"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    return "mov" if head[4:8] in _FIRST_BOXES else None


_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot", b"uuid", b"junk")


def _read(file: BinaryIO, form: str, place: int) -> tuple[int, ...]:
    file.seek(place)
    return struct.unpack(form, file.read(struct.calcsize(form)))


class _Mp4:
    """Boxes: a size, a name, and what is in them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._boxes = self._tracks = self._samples = self._fragments = self._titles = self._title_bytes = 0
        self._edits = self._longest = self._index_bytes = 0
        self._last_time: dict[int, int] = {}
        self._track = 0

    def check(self, size: int) -> None:
        self._walk(0, size, 0, False)
        if self._edits > 2 and self._edits * self._longest > MAX_EDITED_SAMPLES:
            raise HeaderError(f"has {self._edits} edits of up to {self._longest} samples, too many{_PLAIN}")

    def _walk(self, place: int, end: int, depth: int, in_titles: bool) -> None:
        if depth > MAX_DEPTH:
            raise HeaderError(f"has boxes more than {MAX_DEPTH} deep{_PLAIN}")
        while place + 8 <= end:
            length, name = self._head(place)
            head = 8
            if length == 1:
                (length,), head = _read(self._file, ">Q", place + 8), 16
            length = length or end - place
            self._count(name, in_titles, length)
            if length < head:
                return
            self._look(name, place + head, length - head)
            if name in _INSIDE or in_titles and name == b"----":
                skip = 4 if name == b"meta" and self._is_full(place + head) else 0
                stop = min(place + length, end)
                self._walk(place + head + skip, stop, depth + 1, in_titles or name in _TITLES)
            place += length

    def _head(self, place: int) -> tuple[int, bytes]:
        self._file.seek(place)
        length, name = struct.unpack(">I4s", self._file.read(8))
        return length, name

    def _is_full(self, place: int) -> bool:
        """A meta box of MP4 has four bytes of its own before what is in it, one of QuickTime none."""
        return self._head(place)[0] == 0

    def _count(self, name: bytes, in_titles: bool, length: int) -> None:
        self._boxes += 1
        if self._boxes > MAX_BOXES:
            raise HeaderError(f"has more than {MAX_BOXES} boxes{_PLAIN}")
        if name == b"trak":
            self._tracks += 1
            if self._tracks > MAX_TRACKS:
                raise HeaderError(f"has more than {MAX_TRACKS} tracks{_PLAIN}")
        self._titles += in_titles
        if self._titles > 4 * MAX_TITLES:  # a title has up to four boxes
            raise HeaderError(f"has more than {MAX_TITLES} titles{_PLAIN}")
        if name in _UNREAD:
            raise HeaderError(f"holds {_UNREAD[name]}, which is not read here; write it anew as a plain MP4")
        if name in (b"sidx", b"tfra", b"keys"):
            self._index_bytes += length
            if self._index_bytes > MAX_TABLE_BYTES or name == b"keys" and length > MAX_TITLE_BYTES:
                raise HeaderError(f"has an index of more than {MAX_TABLE_BYTES} bytes{_PLAIN}")

    def _look(self, name: bytes, body: int, length: int) -> None:
        if name in (b"stsz", b"stz2"):
            constant, count = _read(self._file, ">II", body + 4)
            self._add_samples(count if not constant or count <= MAX_SAMPLES or not self._is_sound else 0)
        elif name == b"hdlr":
            self._file.seek(body + 8)
            self._is_sound = self._file.read(4) == b"soun"
        elif name == b"trak":
            self._is_sound = False
        elif name == b"elst":
            self._edits = max(self._edits, _read(self._file, ">I", body + 4)[0])
        elif name == b"trun":
            self._add_samples(_read(self._file, ">I", body + 4)[0])
        elif name == b"tfhd":
            self._track = _read(self._file, ">I", body + 4)[0]
        elif name == b"tfdt":
            self._look_at_time(body)
        elif name == b"moof":
            self._fragments += 1
            if self._fragments > MAX_FRAGMENTS:
                raise HeaderError(f"has more than {MAX_FRAGMENTS} fragments{_PLAIN}")

    _is_sound = False

    def _add_samples(self, count: int) -> None:
        self._samples += count
        self._longest = max(self._longest, count)
        if self._samples > MAX_SAMPLES:
            raise HeaderError(f"claims {self._samples} frames and samples or more; cut it shorter")

    def _look_at_time(self, body: int) -> None:
        version = _read(self._file, ">B", body)[0]
        time = _read(self._file, ">Q" if version else ">I", body + 4)[0]
        if time < self._last_time.get(self._track, 0):
            raise HeaderError(f"has fragments out of order{_PLAIN}")
        self._last_time[self._track] = time


class _Matroska:
    """Elements: a name, a size, and what is in them. Sizes of segments and clusters may be unknown: then
    they end where an element begins that cannot be in them, so all are walked over on one level."""

    _SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
    _LIMITS = {  # (what, bytes)
        0x1254C367: ("tags", MAX_TITLE_BYTES),
        0x1043A770: ("chapters", MAX_TITLE_BYTES),
        0x1654AE6B: ("tracks", MAX_TABLE_BYTES),
        0x1C53BB6B: ("an index", 2 * MAX_TABLE_BYTES),
        0x114D9B74: ("a list of places", MAX_TITLE_BYTES),
    }
    _CUES, _CUE, _TIME, _UNKNOWN = 0x1C53BB6B, 0xBB, 0xB3, -1

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._elements = self._cues = self._last = 0
        self._sizes: dict[int, int] = {}

    def check(self, end: int) -> None:
        place = 0
        while place < end:
            name, length, head = self._head(place)
            if name in self._LIMITS:
                self._add(name, length)
            if name == self._CUES:
                self._check_cues(place + head, place + head + length)
            into = name == self._SEGMENT or (name == self._CLUSTER and length == self._UNKNOWN)
            if length == self._UNKNOWN and not into:
                return
            place += head if into else head + length

    def _head(self, place: int) -> tuple[int, int, int]:
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise HeaderError(f"has more than {MAX_ELEMENTS} elements{_PLAIN}")
        self._file.seek(place)
        data = self._file.read(12)
        first = 9 - data[0].bit_length()
        second = 9 - data[first].bit_length()
        if first > 4 or second > 8:
            raise IndexError  # no element: the demuxer looks for the next one
        length = int.from_bytes(data[first : first + second], "big") & (1 << 7 * second) - 1
        unknown = length == (1 << 7 * second) - 1
        return int.from_bytes(data[:first], "big"), self._UNKNOWN if unknown else length, first + second

    def _add(self, name: int, length: int) -> None:
        what, limit = self._LIMITS[name]
        self._sizes[name] = self._sizes.get(name, 0) + length
        if length == self._UNKNOWN or self._sizes[name] > limit:
            raise HeaderError(f"has {what} of more than {limit} bytes{_PLAIN}")

    def _check_cues(self, place: int, end: int) -> None:
        while place < end:
            name, length, head = self._head(place)
            if name == self._CUE and length != self._UNKNOWN:
                inner, size, width = self._head(place + head)
                if inner == self._TIME and 0 <= size <= 8:
                    self._file.seek(place + head + width)
                    self._look_at(int.from_bytes(self._file.read(size), "big"))
            if length == self._UNKNOWN:
                raise HeaderError(f"has an index without an end{_PLAIN}")
            place += head + length

    def _look_at(self, time: int) -> None:
        self._cues += 1
        if self._cues > MAX_CUES or time < self._last:
            raise HeaderError(f"has an index of more than {MAX_CUES} entries, or out of order{_PLAIN}")
        self._last = time


class _Counts:
    """What an AVI file has of what is bounded."""

    def __init__(self) -> None:
        self.chunks = self.streams = self.title_bytes = 0


def _check_avi(file: BinaryIO, place: int, end: int, counts: _Counts) -> None:
    while place + 8 <= end:
        file.seek(place)
        name, length, kind = struct.unpack("<4sI4s", file.read(12))
        counts.chunks += 1
        if name in (b"LIST", b"RIFF"):
            counts.streams += kind == b"strl"
            counts.title_bytes += length if kind == b"INFO" else 0
            if kind in (b"hdrl", b"strl", b"AVI ", b"AVIX"):
                _check_avi(file, place + 12, min(place + 8 + length, end), counts)
        if counts.chunks > MAX_ELEMENTS or counts.streams > MAX_TRACKS:
            raise HeaderError(f"has more than {MAX_ELEMENTS} chunks or {MAX_TRACKS} streams{_PLAIN}")
        if counts.title_bytes > MAX_TITLE_BYTES:
            raise HeaderError(f"has titles of more than {MAX_TITLE_BYTES} bytes{_PLAIN}")
        place += 8 + length + length % 2
