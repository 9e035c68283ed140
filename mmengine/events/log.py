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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import (
    HEADER,
    MAGIC_BYTES,
    MAX_BODY,
    DamagedRecord,
    Record,
    TornRecord,
    UnknownRecord,
    decode_at,
    encode,
)
from mmengine.events.vocabulary import Event, Executed, Queued

SUFFIX = ".mmlog"
SEGMENT_BYTES = 64 * 2**20
RING_RECORDS = 65536
RING_BYTES = 64 * 2**20
MAX_SEGMENTS = 100_000
MAX_SEGMENT_BYTES = 2**32  # a reader refuses more; a writer begins a new segment long before


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
        while len(self.records) > max(1, self._limit if self._held_bytes <= self._max_bytes else 1):
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
    """Appends to a folder. `sync_always`: fdatasync at each commit, against power cuts too.

    Raises LogError when the folder cannot be had, holds a log, or has another writer.
    """

    def __init__(self, folder: Path, *, sync_always: bool = False, segment_bytes: int = SEGMENT_BYTES):
        self._folder = folder
        self._sync_always = sync_always
        self._segment_bytes = segment_bytes
        self._pending: list[bytes] = []
        self._sequence = 0
        self._size = 0
        self._torn = False  # bytes behind `_size` may be in the file that were never committed
        self._fd = -1
        self.num_bytes = 0
        self.stalled = ""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder)
        except OSError as error:
            what = f"no log can be written in {folder}: {error.strerror}"
            raise LogError(f"{what}; name another folder") from None
        if segment_paths(folder):
            os.close(self._lock)
            raise LogError(f"{folder} holds a log already; name another folder, or move that one away")

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
            with suppress(OSError):  # the next try cuts again
                self._cut()
            return False
        self._pending.clear()
        self.stalled = ""
        return True

    def _write(self, data: bytes) -> None:
        """All of `data`, or an OSError and nothing that counts. After a sync that failed the bytes are
        written again, because a second sync alone would promise what it does not hold."""
        self._cut()
        self._torn = True
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._sync_always:
            os.fdatasync(self._fd)
        self._torn = False
        self._size += len(data)
        self.num_bytes += len(data)

    def _cut(self) -> None:
        """Bring the segment back to whole, committed records."""
        if self._torn:
            os.ftruncate(self._fd, self._size)
            self._torn = False

    def _open_segment(self, first_sequence: int) -> None:
        """The next segment, in place of the full one. Raises OSError, and leaves all as it was."""
        if self._fd >= 0:
            os.fdatasync(self._fd)
        path = self._folder / f"{first_sequence:020d}{SUFFIX}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            _sync_folder(self._folder)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        full, self._fd, self._size = self._fd, fd, 0
        if full >= 0:
            os.close(full)

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
        """Commit, and let the folder go. Closing twice is no error. Raises LogError when records that
        were appended cannot be written any more."""
        if self._lock < 0:
            return
        whole, lost = self.commit(), len(self._pending)
        try:
            if self._fd >= 0:
                os.fdatasync(self._fd)
        except OSError as error:
            raise LogError(f"the log in {self._folder} could not be synced: {error.strerror}") from None
        finally:
            for fd in (self._fd, self._lock):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lock = -1
        if not whole:
            raise LogError(f"{self.stalled}; its last {lost} records are lost")


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
    else, or a gap in the sequence, also at its beginning, raises CorruptLog with the file and the byte."""

    def __init__(self, folder: Path):
        self.paths = segment_paths(folder)
        if not self.paths:
            raise LogError(f"{folder} holds no log: no file there ends in {SUFFIX}")
        self.num_bytes = sum(path.stat().st_size for path in self.paths)
        self.torn: TornTail | None = None

    def __iter__(self) -> Iterator[Record]:
        expected = 0
        for path in self.paths:
            for record in self._segment(path, last=path == self.paths[-1]):
                if record.sequence != expected:
                    raise CorruptLog(
                        f"{path.name}, byte {record.offset}: record {record.sequence} stands where record "
                        f"{expected} belongs; records are missing, or not in order"
                    )
                expected = record.sequence + 1
                yield record

    def _segment(self, path: Path, *, last: bool) -> Iterator[Record]:
        size = path.stat().st_size
        if size == 0:
            return
        if size > MAX_SEGMENT_BYTES:
            raise CorruptLog(f"{path.name} has {size} bytes, more than any segment ({MAX_SEGMENT_BYTES})")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            offset = 0
            while offset < size:
                try:
                    record, offset = decode_at(data, offset)
                except UnknownRecord as error:
                    raise CorruptLog(f"{path.name}: {error}") from None
                except (TornRecord, DamagedRecord) as error:
                    if not last or _any_record_after(data, offset):
                        raise CorruptLog(f"{path.name}: {error}") from None
                    self.torn = TornTail(path, offset, size - offset)
                    return
                yield record


def _any_record_after(data: mmap.mmap, offset: int) -> bool:
    """Whether a whole record stands somewhere behind a broken one; then it is no torn tail.

    Bytes that only begin like records cost a checksum each. A write cut short has few of them: where
    they add up to several times the segment, someone made them, and the answer is yes as well.
    """
    patience = 4 * len(data)
    place = data.find(MAGIC_BYTES, offset + 1)
    while place >= 0 and patience > 0:
        try:
            decode_at(data, place)
            return True
        except UnknownRecord:
            return True
        except TornRecord:
            patience -= HEADER.size
        except DamagedRecord:
            length = HEADER.unpack_from(data, place)[4]
            patience -= HEADER.size + (length if length <= MAX_BODY else 0)
        place = data.find(MAGIC_BYTES, place + 1)
    return place >= 0
