"""The log: appended to by one writer, committed with one `write` before any effect leaves.

A log is a folder of segment files named by their first sequence number. Records of a step are
gathered and written together. On a full disk `os.write` returns a short count and raises nothing:
the writer cuts the torn bytes off again, keeps the records, and says that it is stalled.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import DamagedRecord, Record, TornRecord, decode_at, encode
from mmengine.events.vocabulary import Event, Executed, Queued

SUFFIX = ".mmlog"
SEGMENT_BYTES = 64 * 2**20
RING_RECORDS = 65536
RING_BYTES = 64 * 2**20
MAX_SEGMENTS = 100_000


class Sink(Protocol):
    """Where the loop puts events."""

    def append(self, event: Event, step: int, mono_ns: int) -> None: ...

    def commit(self) -> bool:
        """Make everything appended durable against a killed process. False: it could not be."""

    def close(self) -> None: ...


class MemoryLog:
    """The last records in memory, for an engine without a folder. Nothing survives the process.

    Holds at most `limit` records, and at most `max_bytes` of integer columns in them.
    """

    def __init__(self, limit: int = RING_RECORDS, max_bytes: int = RING_BYTES):
        self.records: deque[Record] = deque()
        self._held_bytes = 0
        self._limit, self._max_bytes = limit, max_bytes
        self._sequence = 0

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self.records.append(Record(self._sequence, step, mono_ns, event))
        self._sequence += 1
        self._held_bytes += _column_bytes(event)
        while len(self.records) > self._limit or (self._held_bytes > self._max_bytes and len(self.records) > 1):
            self._held_bytes -= _column_bytes(self.records.popleft().event)

    def commit(self) -> bool:
        return True

    def sync(self) -> None:
        """Nothing to do: memory has no disk behind it."""

    def close(self) -> None:
        self.records.clear()


def _column_bytes(event: Event) -> int:
    """Bytes of the columns of an event that can be long."""
    if isinstance(event, Executed):
        return len(event.token_ids)
    return len(event.prompt) if isinstance(event, Queued) else 0


class LogWriter:
    """Appends to a folder. `sync_always`: fdatasync at each commit, against power cuts too."""

    def __init__(self, folder: Path, *, sync_always: bool = False, segment_bytes: int = SEGMENT_BYTES):
        self._folder = folder
        self._sync_always = sync_always
        self._segment_bytes = segment_bytes
        self._pending: list[bytes] = []
        self._sequence = 0
        self._size = 0
        self._fd = -1
        self.num_bytes = 0
        self.stalled = ""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if segment_paths(folder):
            raise LogError(f"{folder} holds a log already; name another folder, or move that one away")
        self._lock = _lock(folder)

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self._pending.append(encode(event, self._sequence, step, mono_ns))
        self._sequence += 1

    def commit(self) -> bool:
        """Write what was appended. False on a full disk; the records are kept for the next try."""
        if not self._pending:
            return True
        data = b"".join(self._pending)
        try:
            if self._fd < 0 or self._size + len(data) > self._segment_bytes and self._size:
                self._open_segment(self._sequence - len(self._pending))
            self._write(data)
        except OSError as error:
            self.stalled = f"the log in {self._folder} cannot be written: {error.strerror}"
            return False
        self._pending.clear()
        self.stalled = ""
        return True

    def _write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written
        self.num_bytes += written
        if self._sync_always:
            os.fdatasync(self._fd)

    def _open_segment(self, first_sequence: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        fd = os.open(self._folder / f"{first_sequence:020d}{SUFFIX}", flags, 0o600)
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
        self._fd, self._size = fd, 0
        directory = os.open(self._folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def sync(self) -> None:
        """Force what was committed to the disk. Another thread may call it."""
        fd = self._fd
        if fd >= 0:
            try:
                os.fdatasync(fd)
            except OSError as error:
                # The segment may have been rotated (and synced) under us; anything else is real.
                if error.errno != errno.EBADF:
                    raise

    def close(self) -> None:
        self.commit()
        if self._fd >= 0:
            os.fdatasync(self._fd)
            os.close(self._fd)
            self._fd = -1
        os.close(self._lock)


def _lock(folder: Path) -> int:
    """An exclusive lock on the folder, held as long as its descriptor is open."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise LogError(f"another process writes the log in {folder}; name another folder") from None
    return fd


def segment_paths(folder: Path) -> list[Path]:
    """Segments in order. Raises LogError when there are absurdly many."""
    paths = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file() and not path.is_symlink())
    if len(paths) > MAX_SEGMENTS:
        raise LogError(f"{folder} holds more than {MAX_SEGMENTS} segments")
    return paths


@dataclass(slots=True)
class TornTail:
    """Bytes at the end of the last segment that are no whole record: a write was cut short."""

    path: Path
    offset: int
    num_bytes: int


class LogReader:
    """Reads a folder. A torn tail ends the iteration and is reported in `torn`; damage anywhere
    else, or a gap in the sequence, raises CorruptLog with the file and the byte."""

    def __init__(self, folder: Path):
        self.paths = segment_paths(folder)
        if not self.paths:
            raise LogError(f"{folder} holds no log: no file there ends in {SUFFIX}")
        self.num_bytes = sum(path.stat().st_size for path in self.paths)
        self.torn: TornTail | None = None

    def __iter__(self) -> Iterator[Record]:
        expected: int | None = None
        for path in self.paths:
            for record in self._segment(path, last=path == self.paths[-1]):
                if expected is not None and record.sequence != expected:
                    raise CorruptLog(
                        f"{path.name}, byte {record.offset}: record {record.sequence} follows record "
                        f"{expected - 1}; the records between are missing"
                    )
                expected = record.sequence + 1
                yield record

    def _segment(self, path: Path, *, last: bool) -> Iterator[Record]:
        size = path.stat().st_size
        if size == 0:
            return
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offset = 0
            while offset < size:
                try:
                    record, offset = decode_at(data, offset)
                except TornRecord:
                    if not last:
                        raise CorruptLog(f"{path.name}, byte {offset}: the segment is cut short") from None
                    self.torn = TornTail(path, offset, size - offset)
                    return
                except DamagedRecord as error:
                    if last and not _any_record_after(data, offset):
                        self.torn = TornTail(path, offset, size - offset)
                        return
                    raise CorruptLog(f"{path.name}: {error}") from None
                yield record


def _any_record_after(data: mmap.mmap, offset: int) -> bool:
    """Whether a whole record stands somewhere behind a damaged one; then it is no torn tail."""
    place = data.find(b"MMEV", offset + 1)
    while place >= 0:
        try:
            decode_at(data, place)
            return True
        except (TornRecord, DamagedRecord):
            place = data.find(b"MMEV", place + 1)
    return False
