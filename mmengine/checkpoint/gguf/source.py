"""A file from anybody that is read from its beginning: nothing is taken that the file does not hold."""

import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

from mmengine.errors import ModelError

MAX_METADATA_BYTES = 128 * 2**20  # before the weights; a vocabulary of 262,144 tokens takes 16 MB
MAX_STRING_BYTES = 16 * 2**20  # of one value; chat templates have up to 100 kB
MAX_STRINGS = 2**21  # in all arrays together: the largest vocabulary and its merges are 777,000


class Source:
    """`position`: of the next byte. Every method raises ModelError where the file ends too early."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self.path, self.num_bytes, self.position = path, num_bytes, 0
        self._file, self._strings = file, 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")

    @property
    def left(self) -> int:
        """Bytes behind `position`."""
        return self.num_bytes - self.position

    def take(self, count: int) -> bytes:
        self._advance(count)
        found = self._file.read(count)
        if len(found) != count:  # somebody else cuts the file meanwhile
            self._cut_short()
        return found

    def skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, 1)

    def scalar(self, form: struct.Struct) -> int | float | bool:
        value: int | float | bool = form.unpack(self.take(form.size))[0]
        return value

    def count(self, num_bytes: int) -> int:
        """An unsigned integer of 4 or 8 bytes."""
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self, what: str, most: int = MAX_STRING_BYTES) -> str:
        """UTF-8 behind its length in 8 bytes."""
        length = self.count(8)
        if length > most:
            self.fail(f"{what} has {length} bytes; at most {most} are read")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8; the file is damaged, download it again")

    def skip_strings(self, count: int, what: str) -> None:
        """Past `count` strings: each is measured, and none is kept."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            self.fail(f"with {what} it has {self._strings} strings; at most {MAX_STRINGS} are read")
        read, seek, position = self._file.read, self._file.seek, self.position
        end = min(self.num_bytes, MAX_METADATA_BYTES)
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            position += 8 + length
            if position > end:
                self._advance(position - self.position)
            seek(length, 1)
        self._advance(position - self.position)

    def _advance(self, count: int) -> None:
        if count > self.left:
            self._cut_short()
        self.position += count
        if self.position > MAX_METADATA_BYTES:
            self.fail(f"more than {MAX_METADATA_BYTES} bytes stand before the weights, too many to read")

    def _cut_short(self) -> NoReturn:
        self.fail(f"it is cut short or damaged: it ends after {self.num_bytes} bytes; download it again")
