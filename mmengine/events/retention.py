"""Packs full segments, and deletes old segments if a log is too large or too old.

A segment is deleted only if all requests that begin in this segment or earlier were delivered, and a suitable
snapshot exists. The snapshot must be at the segment's last record or later, so that the rest of the log can
be replayed. It must precede the first undelivered request, so that this request can be resumed.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import zstandard

from mmengine.events.file_system import open_file, sync_folder
from mmengine.events.segment import (
    MAX_UNPACKED_BYTES,
    PACKED_SUFFIX,
    SUFFIX,
    snapshot_sequences,
)
from mmengine.events.vocabulary import Delivered, Event, Finished, Queued

PACK_LEVEL = 3
NO_SNAPSHOT = -1  # record number if there is no snapshot
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits for a log's size and age. Segments beyond the newest `max_bytes` bytes, and segments older than
    `max_age_s` seconds, are deleted. 0 means no limit.
    """

    max_bytes: int = 0
    max_age_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.max_bytes or self.max_age_s)


class Undelivered:
    """Requests whose answers have not reached their consumers.

    `begins`: request id -> number of the record with its QUEUED, ascending. `ended`: ids of requests that
    have ended. `oldest`: the smallest number in `begins`, or NONE. Any thread may read `oldest`.
    """

    NONE = 2**64

    def __init__(self, begins: Mapping[str, int] = MappingProxyType({}), ended: Iterable[str] = ()) -> None:
        self.begins = dict(begins)
        self.ended = set(ended)
        self._order = deque((sequence, name) for name, sequence in self.begins.items())
        self.oldest = self.NONE
        self._look()

    def copy(self) -> "Undelivered":
        return Undelivered(self.begins, self.ended)

    def see(self, event: Event, sequence: int) -> None:
        """Update the requests with an event. `sequence`: the number of the event's record."""
        match event:
            case Queued(request_id=name):
                self.begins.pop(name, None)
                self.begins[name] = sequence
                self._order.append((sequence, name))
                self.ended.discard(name)
            case Finished(request_id=name) if name in self.begins:
                self.ended.add(name)
                return
            case Delivered(request_id=name) if name in self.ended:
                self.ended.discard(name)
                del self.begins[name]
            case _:
                return
        self._look()

    def _look(self) -> None:
        order, begins = self._order, self.begins
        while order and begins.get(order[0][1]) != order[0][0]:
            order.popleft()
        if len(order) > 2 * len(begins) + 64:  # most entries belong to delivered requests
            self._order = order = deque((sequence, name) for name, sequence in begins.items())
        self.oldest = order[0][0] if order else self.NONE


def pack(path: Path) -> Path:
    """Replace a full segment by a zstd file, and return the file's path. A segment above MAX_UNPACKED_BYTES
    is not packed, and its own path is returned.

    If the process is killed meanwhile, both files may exist. After an OSError, the segment is unchanged.
    """
    written = path.stat()
    if not 0 < written.st_size <= MAX_UNPACKED_BYTES:
        return path
    packer = zstandard.ZstdCompressor(PACK_LEVEL, write_checksum=True, write_content_size=True)
    target = path.with_name(path.stem + PACKED_SUFFIX)
    part = target.with_name(target.name + ".part")
    try:
        with path.open("rb") as source, open(open_file(part, _NEW), "wb") as file:
            packer.copy_stream(source, file, size=written.st_size)
            file.flush()
            os.fsync(file.fileno())
        os.utime(part, ns=(written.st_atime_ns, written.st_mtime_ns))
        part.replace(target)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)
    path.unlink(missing_ok=True)
    return target


@dataclass(slots=True)
class _Full:
    """A full segment. `behind`: the number of the first record after the segment. `size`, `mtime`: the file's
    size in bytes and modification time, set when the segment is examined.
    """

    path: Path
    behind: int
    size: int = 0
    mtime: float = 0.0
    is_gone: bool = False


class FullSegments:
    """A log's full segments, oldest first. They are packed, and deleted when the retention allows it.

    Only the writer calls `add`; another thread may call all other methods. To keep calls fast, the segments
    are listed only when the writer opens the folder. The snapshots are listed only when a segment was added,
    or when the oldest segment should be deleted.
    """

    def __init__(self, folder: Path, retention: Retention, *, packs: bool) -> None:
        self._folder, self._retention, self._packs = folder, retention, packs
        self._new: deque[_Full] = deque()  # added segments that were not examined yet
        self._kept: deque[_Full] = deque()
        self._to_pack: deque[_Full] = deque()
        self._num_bytes = self._snapshot_bytes = 0

    def add(self, path: Path, behind: int) -> None:
        """Add a full segment. `behind`: the number of the first record in the next segment."""
        self._new.append(_Full(path, behind))

    @property
    def waits_for_packing(self) -> bool:
        return bool(self._packs and (self._new or self._to_pack))

    def let_go(self, needed_from: int, open_bytes: int) -> None:
        """Delete segments that exceed the retention limits. `needed_from`: the number of the oldest
        undelivered request's first record. This record and all later records must stay. `open_bytes`: the
        current segment's size. Raises OSError, LogError.
        """
        self._take_in()
        gone: list[_Full] = []
        covered: int | None = None
        while self._kept and self._goes(oldest := self._kept[0], open_bytes) and oldest.behind <= needed_from:
            if covered is None:
                before = (number for number in snapshot_sequences(self._folder) if number < needed_from)
                covered = max(before, default=NO_SNAPSHOT)
            if oldest.behind > covered + 1:
                break
            gone.append(self._kept.popleft())
            gone[-1].is_gone = True
            self._num_bytes -= oldest.size
        if gone:
            drop(self._folder, [each.path for each in gone], gone[-1].behind)
            self._count_snapshots()

    def _goes(self, oldest: _Full, open_bytes: int) -> bool:
        most, age_s = self._retention.max_bytes, self._retention.max_age_s
        too_large = most and self._num_bytes + self._snapshot_bytes + open_bytes > most
        return bool(too_large or age_s and time.time() - oldest.mtime > age_s)

    def _take_in(self) -> None:
        is_any = bool(self._new)
        while self._new:
            full = self._new[0]
            with suppress(FileNotFoundError):  # another process has deleted the file
                status = full.path.stat()
                full.size, full.mtime = status.st_size, status.st_mtime
                self._num_bytes += full.size
                self._kept.append(full)
                if self._packs and full.path.name.endswith(SUFFIX):
                    self._to_pack.append(full)
            self._new.popleft()
        if is_any and self._retention:
            self._count_snapshots()

    def _count_snapshots(self) -> None:
        self._snapshot_bytes = sum(path.stat().st_size for path in self._folder.glob("snapshot-*.mmsnap"))

    def pack_one(self) -> None:
        """Pack the oldest unpacked segment. If OSError is raised, the next call tries again."""
        self._take_in()
        while self._to_pack and self._to_pack[0].is_gone:
            self._to_pack.popleft()
        if self._to_pack:
            full, before = self._to_pack[0], self._to_pack[0].size
            with suppress(FileNotFoundError):  # another process has deleted the file
                full.path = pack(full.path)
                full.size = full.path.stat().st_size
                self._num_bytes += full.size - before
            self._to_pack.popleft()


def drop(folder: Path, paths: list[Path], first: int) -> None:
    """Delete the segments in `paths` and their .cut files, so that the log begins with record `first`. Also
    delete snapshots whose next record is no longer in the log.
    """
    for path in paths:
        for cut in folder.glob(f"{path.name.split('.')[0]}.*.cut"):
            cut.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for sequence in snapshot_sequences(folder):
        if sequence < first - 1:
            (folder / f"snapshot-{sequence:020d}.mmsnap").unlink(missing_ok=True)
