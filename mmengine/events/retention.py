"""What becomes of segments that are full: they are packed, and the oldest go when the log is too large
or too old.

A segment goes only when every request that begins in it or before it was delivered, and a snapshot holds
the state behind its last record and before the first request that was not: from there what is kept can be
replayed, and every request in it can be resumed.
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
NO_SNAPSHOT = -1  # in place of its sequence
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a log is kept: its newest `max_bytes`, and what was written in the last `max_age_s`;
    0: all of it. What lies beyond either goes."""

    max_bytes: int = 0
    max_age_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.max_bytes or self.max_age_s)


class Undelivered:
    """Requests whose answer did not reach its consumer. `begins`: the records that they begin with, in
    order, by id; `ended`: those of them whose answer is whole. `oldest`: the first of these records, or NONE;
    another thread may read it."""

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
        """Record `sequence` of the log."""
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
        if len(order) > 2 * len(begins) + 64:  # many came and went behind one that stays
            self._order = order = deque((sequence, name) for name, sequence in begins.items())
        self.oldest = order[0][0] if order else self.NONE


def pack(path: Path) -> Path:
    """Replace a full segment by its zstd, and give that; a huge one stays. A process killed meanwhile leaves
    the segment as it was, or both. Raises OSError, and then the segment stays as it is."""
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
    """A full segment. `behind`: the record behind its last one. `size` and `mtime`: of its file, when the
    thread that tidies has seen it."""

    path: Path
    behind: int
    size: int = 0
    mtime: float = 0.0
    is_gone: bool = False


class FullSegments:
    """The full segments of a log, the oldest first: they are packed, and go. The log's writer adds them;
    another thread may tidy. A call costs what it packs and lets go, however many there are: the folder is
    listed when the writer opens it, and snapshots when a segment comes or goes."""

    def __init__(self, folder: Path, retention: Retention, *, packs: bool) -> None:
        self._folder, self._retention, self._packs = folder, retention, packs
        self._new: deque[_Full] = deque()  # added, and not seen yet by the thread that tidies
        self._kept: deque[_Full] = deque()
        self._to_pack: deque[_Full] = deque()
        self._num_bytes = self._snapshot_bytes = 0

    def add(self, path: Path, behind: int) -> None:
        """A segment is full, and record `behind` begins the next one."""
        self._new.append(_Full(path, behind))

    @property
    def waits_for_packing(self) -> bool:
        return bool(self._packs and (self._new or self._to_pack))

    def let_go(self, needed_from: int, open_bytes: int) -> None:
        """Delete what retention does not keep. `needed_from`: the first record that a request which was not
        delivered began with. `open_bytes`: of the segment that is written. Raises OSError, LogError."""
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
            with suppress(FileNotFoundError):  # somebody else took it away
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
        """Pack the oldest that is not packed. Raises OSError; then it is tried again."""
        self._take_in()
        while self._to_pack and self._to_pack[0].is_gone:
            self._to_pack.popleft()
        if self._to_pack:
            full, before = self._to_pack[0], self._to_pack[0].size
            with suppress(FileNotFoundError):  # somebody else took it away
                full.path = pack(full.path)
                full.size = full.path.stat().st_size
                self._num_bytes += full.size - before
            self._to_pack.popleft()


def drop(folder: Path, paths: list[Path], first: int) -> None:
    """Delete segments, what was cut off them, and the snapshots that nothing continues any more: the log is
    to begin with record `first`."""
    for path in paths:
        for cut in folder.glob(f"{path.name.split('.')[0]}.*.cut"):
            cut.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for sequence in snapshot_sequences(folder):
        if sequence < first - 1:
            (folder / f"snapshot-{sequence:020d}.mmsnap").unlink(missing_ok=True)
