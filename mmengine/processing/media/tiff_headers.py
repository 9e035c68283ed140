"""The directories of a TIFF file, and of EXIF data, which are one: bounded before a decoder reads them."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TAGS = 1024  # of one directory
MAX_DIRECTORIES = 8
MAX_STRIPS = 2**15  # or tiles
MAX_NUMBERS = 2**18  # of all tags that hold numbers: a palette of 16 bits has 196,608
MAX_FRACTIONS = 2**12
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_BYTES, _FRACTIONS = (1, 2, 6, 7), (5, 10)
_STRIP_OFFSETS, _STRIP_COUNTS = (273, 324), (279, 325)
_DIRECTORIES = (34665, 34853, 40965)  # EXIF, GPS, interoperability: one offset each
_MAGIC = {b"II*\0": "<", b"MM\0*": ">", b"II+\0": "<", b"MM\0+": ">"}


class HeaderError(ValueError):
    """Why a file is not decoded: the end of a sentence that begins with what it is."""


@dataclass(frozen=True, slots=True)
class _Entry:
    tag: int
    kind: int
    count: int
    place: int  # of its value in the file

    @property
    def size(self) -> int:
        return self.count * _SIZES.get(self.kind, 0)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._order, self._big = data, _MAGIC[data[:4]], b"+" in data[2:4]
        self._word = "Q" if self._big else "I"

    def number(self, form: str, place: int) -> int:
        value: int = struct.unpack_from(self._order + form, self._data, place)[0]
        return value

    @property
    def first(self) -> int:
        return self.number(self._word, 8 if self._big else 4)

    def directory(self, place: int) -> tuple[list[_Entry], int]:
        """Its entries, and where the next one stands: 0, nowhere."""
        head, step, word = (8, 20, 8) if self._big else (2, 12, 4)
        count = self.number("Q" if self._big else "H", place)
        if count > MAX_TAGS:
            raise HeaderError(f"has a directory of {count} tags, more than {MAX_TAGS}")
        places = range(place + head, place + head + count * step, step)
        return [self._entry(at, word) for at in places], self.number(self._word, places.stop)

    def _entry(self, at: int, word: int) -> _Entry:
        tag, kind = (self.number("H", at), self.number("H", at + 2))
        entry = _Entry(tag, kind, self.number(self._word, at + 4), at + 4 + word)
        if entry.size <= word:
            return entry
        return _Entry(tag, kind, entry.count, self.number(self._word, at + 4 + word))

    def numbers(self, entry: _Entry) -> Iterator[int]:
        form = {3: "H", 4: "I", 16: "Q"}.get(entry.kind)
        if form is not None and entry.place + entry.size <= len(self._data):
            yield from struct.unpack_from(f"{self._order}{entry.count}{form}", self._data, entry.place)


def is_tiff(data: bytes) -> bool:
    return data[:4] in _MAGIC


def check_tiff(data: bytes) -> None:
    """Raise HeaderError where a decoder would do more than the file's bytes let expect, and for a second
    page. What is cut short is left to the decoder."""
    try:
        reader = _Reader(data)
        entries, following = reader.directory(reader.first)
        if following and following != reader.first:
            raise HeaderError("is a TIFF of several pages; pass each page as an image")
        _check(reader, entries, len(data))
    except struct.error:
        return


def check_exif(data: bytes) -> None:
    """As check_tiff, for EXIF data, whose second directory is a small picture."""
    data = data.removeprefix(b"Exif\0\0")
    if not is_tiff(data):
        return
    try:
        reader = _Reader(data)
        entries, _ = reader.directory(reader.first)
        _check(reader, entries, len(data))
    except struct.error:
        return


def _check(reader: _Reader, entries: list[_Entry], num_bytes: int) -> None:
    """Tags do not share bytes, so all of them together are no more than the file."""
    waiting, seen = [entries], 0
    size = numbers = fractions = 0
    while waiting:
        entries, seen = waiting.pop(), seen + 1
        if seen > MAX_DIRECTORIES:
            raise HeaderError(f"has more than {MAX_DIRECTORIES} directories of tags")
        for entry in entries:
            size += entry.size
            if entry.kind in _FRACTIONS:
                fractions += entry.count
            elif entry.tag in _STRIP_OFFSETS + _STRIP_COUNTS:
                _check_strips(reader, entry, num_bytes)
            elif entry.kind not in _BYTES:
                numbers += entry.count
            if entry.tag in _DIRECTORIES and entry.count == 1:
                waiting.append(_directory_at(reader, entry))
        if size > num_bytes:
            raise HeaderError("has tags that claim more bytes than the file holds")
        if numbers > MAX_NUMBERS or fractions > MAX_FRACTIONS:
            raise HeaderError(f"has more than {MAX_NUMBERS} numbers or {MAX_FRACTIONS} fractions in its tags")


def _check_strips(reader: _Reader, entry: _Entry, num_bytes: int) -> None:
    if entry.count > MAX_STRIPS:
        raise HeaderError(
            f"has {entry.count} strips or tiles, more than {MAX_STRIPS}; save it with larger ones"
        )
    if entry.tag in _STRIP_COUNTS and entry.count > 1 and sum(reader.numbers(entry)) > 2 * num_bytes:
        raise HeaderError("has strips that claim more bytes than the file holds")


def _directory_at(reader: _Reader, entry: _Entry) -> list[_Entry]:
    for place in reader.numbers(entry):
        try:
            return reader.directory(place)[0]
        except struct.error:
            break
    return []
