"""Reads an untrusted file from its beginning, and never allocates more memory than the file has bytes."""

import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

from mmengine.errors import ModelError

MAX_METADATA_BYTES = 128 * 2**20  # Limit for the metadata; a vocabulary with 262,144 tokens takes 16 MB.
MAX_STRING_BYTES = 16 * 2**20  # Limit per string; chat templates have up to 100 kB.
MAX_STRINGS = 2**21  # Limit for the strings in all arrays; the largest vocabulary with merges has 777,000.


class Source:
    """A file with a read position. `position`: offset of the next byte. Every method raises ModelError if the
    file ends too early.
    """

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self.path, self.num_bytes, self.position = path, num_bytes, 0
        self._file, self._strings = file, 0

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")

    @property
    def remaining(self) -> int:
        """Return how many bytes follow `position`."""
        return self.num_bytes - self.position

    def take(self, count: int) -> bytes:
        self._advance(count)
        found = self._file.read(count)
        if len(found) != count:  # Another process has truncated the file meanwhile.
            self._cut_short()
        return found

    def skip(self, count: int) -> None:
        self._advance(count)
        self._file.seek(count, 1)

    def scalar(self, form: struct.Struct) -> int | float | bool:
        value: int | float | bool = form.unpack(self.take(form.size))[0]
        return value

    def count(self, num_bytes: int) -> int:
        """Read an unsigned integer. `num_bytes`: its size, 4 or 8."""
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self, what: str, most: int = MAX_STRING_BYTES) -> str:
        """Read a length in 8 bytes, and a UTF-8 string with this length. `what` names the string in
        errors.
        """
        length = self.count(8)
        if length > most:
            self.fail(f"{what} has {length} bytes; the limit is {most}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8; the file is damaged, download it again")

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` strings: read their lengths, and seek past their contents."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            self.fail(f"with {what} the file has {self._strings} strings; the limit is {MAX_STRINGS}")
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
        if count > self.remaining:
            self._cut_short()
        self.position += count
        if self.position > MAX_METADATA_BYTES:
            self.fail(f"the metadata before the weights exceeds {MAX_METADATA_BYTES} bytes")

    def _cut_short(self) -> NoReturn:
        self.fail(f"it is cut short or damaged: it ends after {self.num_bytes} bytes; download it again")
