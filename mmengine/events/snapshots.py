"""Reads and writes a log's snapshot files. snapshot-00000000000000012345.mmsnap holds the state after record
12345.

A snapshot is first written under a temporary name, so a file with its final name is complete.
"""

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mmengine.errors import CorruptLog, LogError
from mmengine.events.file_system import open_file, write_whole
from mmengine.events.segment import first_sequence_of, segment_paths, snapshot_sequences

SUFFIX = ".mmsnap"
MAGIC = b"mmsn"
HEADER = struct.Struct("<4sHHQI")  # magic, version, reserved, body length, body CRC-32
EVERY_RECORDS = 2**13  # a reader applies this many records in about 0.25 s
NUM_NEWEST = 3  # newest snapshots that are never deleted, in case some are damaged
MAX_BYTES = 2**33
_CHUNK = 2**20


class SnapshotFolder:
    """Writes a log's snapshots. A snapshot is due when the log has grown by `every_bytes` bytes or
    `every_records` records. The log does not need its snapshots, so a failed write is ignored.
    `in_background`: whether another thread calls `flush`.
    """

    def __init__(
        self,
        folder: Path,
        every_bytes: int,
        every_records: int = EVERY_RECORDS,
        *,
        begin: int = 0,
        in_background: bool = False,
    ):
        self._folder, self._every_bytes, self._every_records = folder, every_bytes, every_records
        self._next_at, self._next_record = every_bytes, begin + every_records
        self.in_background = in_background
        self._waiting: tuple[int, Callable[[], bytes | bytearray]] | None = None
        for part in folder.glob(f"snapshot-*{SUFFIX}.part"):  # files that a killed process left
            part.unlink(missing_ok=True)

    def is_due(self, num_bytes: int, num_records: int) -> bool:
        """Return whether a snapshot is due when the log has `num_bytes` bytes and `num_records` records."""
        return num_bytes >= self._next_at or num_records >= self._next_record

    def put(self, sequence: int, make: Callable[[], bytes | bytearray], num_bytes: int) -> None:
        """Set the snapshot that the next `flush` writes. Replaces a waiting snapshot. `make`: returns the
        snapshot's bytes. `num_bytes`: the log's current size.
        """
        self._next_at, self._next_record = num_bytes + self._every_bytes, sequence + 1 + self._every_records
        self._waiting = sequence, make

    @property
    def waits(self) -> bool:
        return self._waiting is not None

    def flush(self) -> None:
        """Write the waiting snapshot. Delete all snapshots except the first in each segment and the
        NUM_NEWEST newest. Not thread-safe.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        with suppress(OSError, LogError):
            sequence, make = waiting
            write_whole(snapshot_path(self._folder, sequence), make())
            for spare in _spare(self._folder):
                snapshot_path(self._folder, spare).unlink(missing_ok=True)


def _spare(folder: Path) -> Iterator[int]:
    """Yield the snapshots that `flush` deletes."""
    firsts = [first_sequence_of(path) for path in segment_paths(folder)]
    seen = set()
    for sequence in snapshot_sequences(folder)[:-NUM_NEWEST]:
        segment = bisect_right(firsts, sequence + 1)
        if segment in seen:
            yield sequence
        seen.add(segment)


def drop_behind(folder: Path, sequence: int) -> None:
    """Delete the snapshots taken at record `sequence` or later, before the writer replaces these records.
    Raises OSError.
    """
    for path in folder.glob(f"snapshot-*{SUFFIX}"):
        name = path.stem.removeprefix("snapshot-")
        if name.isdecimal() and int(name) >= sequence:
            path.unlink(missing_ok=True)


def snapshot_path(folder: Path, sequence: int) -> Path:
    return folder / f"snapshot-{sequence:020d}{SUFFIX}"


def read_snapshot(folder: Path, sequence: int) -> bytes:
    """Return a snapshot's bytes.

    Raises LogError for an unreadable file, CorruptLog for an impossible size.
    """
    path = snapshot_path(folder, sequence)
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise CorruptLog(f"{path.name} is larger than any snapshot ({MAX_BYTES} bytes)")
    return data


def damage_of(folder: Path, sequence: int) -> str:
    """Return how a snapshot file is damaged, or "" if its length and checksum are correct."""
    path = snapshot_path(folder, sequence)
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size or head[:4] != MAGIC:
                return f"{path.name} does not begin like a snapshot"
            *_, length, expected = HEADER.unpack(head)
            if os.fstat(file.fileno()).st_size != HEADER.size + length:
                return f"{path.name} does not have the length in its header"
            crc = 0
            while piece := file.read(_CHUNK):
                crc = zlib.crc32(piece, crc)
    except FileNotFoundError:
        return ""  # a running writer has deleted the file
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return "" if crc == expected else f"{path.name} is damaged: its checksum does not match"
