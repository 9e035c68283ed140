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

from mmengine.events.files import open_file, sync_folder
from mmengine.events.segment import (
    MAX_UNPACKED_BYTES,
    PACKED_SUFFIX,
    first_sequence_of,
    segment_paths,
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


def pack(path: Path) -> None:
    """Replace a full segment by its zstd. A process killed meanwhile leaves the segment as it was, or
    both. Raises OSError, and then the segment stays as it is."""
    written = path.stat()
    if not 0 < written.st_size <= MAX_UNPACKED_BYTES:
        return
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
    path.unlink()


def expendable(folder: Path, retention: Retention, needed_from: int) -> list[Path]:
    """Segments that may go, the oldest first. `needed_from`: the first record that a request which was
    not delivered began with. The last segment always stays."""
    paths = segment_paths(folder)
    covered = max(
        (number for number in snapshot_sequences(folder) if number < needed_from), default=NO_SNAPSHOT
    )
    status = [path.stat() for path in paths]
    total = sum(each.st_size for each in status)
    now_s = time.time()
    gone: list[Path] = []
    for path, after, each in zip(paths, paths[1:], status):
        behind = first_sequence_of(after)  # the record behind the segment's last
        too_large = retention.max_bytes and total > retention.max_bytes
        too_old = retention.max_age_s and now_s - each.st_mtime > retention.max_age_s
        if not (too_large or too_old) or behind > needed_from or behind > covered + 1:
            break
        total -= each.st_size
        gone.append(path)
    return gone


def drop(folder: Path, paths: list[Path]) -> None:
    """Delete segments, what was cut off them, and the snapshots that nothing continues any more."""
    if not paths:
        return
    for path in paths:
        for cut in folder.glob(f"{path.name.split('.')[0]}.*.cut"):
            cut.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    first = first_sequence_of(segment_paths(folder)[0])
    for sequence in snapshot_sequences(folder):
        if sequence < first - 1:
            (folder / f"snapshot-{sequence:020d}.mmsnap").unlink(missing_ok=True)
