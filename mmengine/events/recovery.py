"""Reads and repairs damaged logs, and reports which records were lost. There are three recovery modes:

    strict    any damage is an error
    tail      incomplete bytes at the very end are ignored, because a write was interrupted
    salvage   damage in the middle is skipped too, and reading continues with the next complete record

Incomplete bytes at the end are called a torn tail. A writer that continues a log cuts off the torn tail, but
never changes damage in the middle.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import DamagedRecord, Frame, TornRecord, UnknownRecord
from mmengine.events.file_system import open_file
from mmengine.events.segment import (
    HEADER_SIZE,
    PACKED_SUFFIX,
    Follows,
    Scan,
    find_whole,
    first_sequence_of,
    open_segment,
    part_of,
    segment_paths,
)

CUT_SUFFIX = ".cut"
MAX_KEPT_BYTES = 64 * 2**20  # maximum size of the .cut file, which keeps a torn tail
Mode = Literal["strict", "tail", "salvage"]


@dataclass(slots=True)
class Cut:
    """Bytes in a segment that a reader ignores. `what`: the reason. `num_lost`: number of missing records,
    starting with record `first_lost`; 0 if no later record shows the number.
    """

    path: Path
    offset: int
    num_bytes: int
    kind: str
    what: str
    first_lost: int
    num_lost: int = 0

    def __str__(self) -> str:
        lost = f"; {self.num_lost} records from {self.first_lost} on are lost" if self.num_lost else ""
        return f"{self.path.name}, byte {self.offset}: {self.num_bytes} bytes are ignored: {self.what}{lost}"


@dataclass(slots=True)
class Recovery:
    """The result when a log is read or repaired. `cuts`: the bytes that a reader skipped or a writer cut off.

    `torn`: the cut that is a torn tail, or None. `next_sequence`: the next record's number. `is_closed`:
    whether the log ends with a footer. `tail`: `repair_tail`'s walk over the last segment, or None.
    """

    mode: Mode
    cuts: list[Cut] = field(default_factory=list)
    torn: Cut | None = None
    next_sequence: int = 0
    is_closed: bool = False
    tail: "Walk | None" = None

    @property
    def num_bytes(self) -> int:
        return sum(cut.num_bytes for cut in self.cuts)

    @property
    def num_lost(self) -> int:
        return sum(cut.num_lost for cut in self.cuts)


def check_mode(mode: str) -> None:
    """Raise LogError if the recovery mode is unknown."""
    if mode not in get_args(Mode):
        raise LogError(f"unknown recovery mode {mode!r}; use {', '.join(get_args(Mode))}")


class Walk:
    """Iterates over the complete frames in the segment at `path`, and adds skipped bytes to `recovery`.

    `end`: the offset at which the last frame ended. Raises CorruptLog for damage that the recovery mode does
    not tolerate.
    """

    def __init__(self, path: Path, data: bytes | mmap.mmap, recovery: Recovery, *, is_last: bool):
        self.scan = Scan(data)
        self.end = 0
        self.path, self.recovery, self._is_last = path, recovery, is_last
        self._skipped: Cut | None = None  # the last cut, whose `num_lost` the next frame shows

    def __iter__(self) -> Iterator[Frame]:
        jump_to, recovery = None, self.recovery
        while True:
            try:
                for frame in self.scan.frames(jump_to):
                    self.end = frame.end
                    if frame.sequence != recovery.next_sequence and not self._bridge(frame):
                        continue
                    recovery.next_sequence = frame.sequence + frame.count
                    yield frame
                break
            except UnknownRecord as error:
                raise CorruptLog(f"{self.path.name}: {error}", error.kind) from None
            except (TornRecord, DamagedRecord) as error:
                jump_to = self._skip(error)
                if jump_to is None:
                    break
        recovery.is_closed = self.scan.is_closed
        if not self._is_last and recovery.mode == "strict" and self.scan.header and not self.scan.is_closed:
            raise CorruptLog(f"{self.path.name} has no footer, so it may be incomplete", "truncated")

    def _skip(self, error: TornRecord | DamagedRecord) -> int | None:
        """Return the offset at which to continue after damage, or None if the rest of the segment has no
        complete frame and no footer.
        """
        data, recovery = self.scan.data, self.recovery
        place = self.end = self.end or (HEADER_SIZE if self.scan.header else 0)
        try:
            behind = find_whole(data, place + 1)
        except CorruptLog as made:
            raise CorruptLog(f"{self.path.name}: {made}", made.kind) from None
        torn = behind is None and self._is_last
        if recovery.mode == "strict" or recovery.mode == "tail" and not torn:
            kind = "length" if behind is not None else "truncated"
            raise CorruptLog(f"{self.path.name}: {error}", getattr(error, "kind", kind)) from None
        size = (len(data) if behind is None else behind) - place
        kind = getattr(error, "kind", "truncated" if behind is None else "length")
        cut = Cut(self.path, place, size, kind, str(error), recovery.next_sequence)
        recovery.cuts.append(cut)
        if torn:
            recovery.torn = cut
        self._skipped = cut
        self.end = place if behind is None else behind
        return behind

    def _bridge(self, frame: Frame) -> bool:
        """Return whether to accept a frame with an unexpected sequence number. Raises CorruptLog unless the
        mode is salvage.
        """
        recovery = self.recovery
        missing = frame.sequence - recovery.next_sequence
        what = (
            f"record {frame.sequence} was found instead of record {recovery.next_sequence}; records are "
            "missing, or not in order"
        )
        if recovery.mode != "salvage":
            raise CorruptLog(f"{self.path.name}, byte {frame.offset}: {what}", "gap")
        size = 0 if missing > 0 else frame.end - frame.offset
        cut = self._skipped
        if cut is None or missing < 0:
            cut = Cut(self.path, frame.offset, size, "gap", what, recovery.next_sequence)
            recovery.cuts.append(cut)
        cut.num_lost, self._skipped = max(0, missing), None
        return missing > 0


def walk_segment(path: Path) -> Walk:
    """Walk over a segment in the mode salvage, as over a log's last segment. Raises CorruptLog or LogError if
    the segment cannot be opened or has an unknown format.
    """
    with open_segment(path) as data:
        walk = Walk(path, data, Recovery("salvage", next_sequence=first_sequence_of(path)), is_last=True)
        for _ in walk:
            pass
    return walk


def repair_tail(folder: Path, mode: Mode, check: Callable[[Walk], None] | None = None) -> Recovery:
    """Prepare a log for continuation in a new segment: cut off the last segment's torn tail, and add a
    footer.

    The caller holds the lock. Earlier segments are not read. `check`: called with the walk over the last
    segment before anything is changed; it may raise an exception. The first 64 MiB of the cut bytes are kept
    in a .cut file, if the disk has space. Raises CorruptLog for damage that `mode` does not tolerate, and
    LogError if the repair cannot be written.
    """
    check_mode(mode)
    recovery = Recovery(mode)
    paths = segment_paths(folder)
    if not paths:
        return recovery
    path = paths[-1]
    recovery.next_sequence = first_sequence_of(path)
    with open_segment(path) as data:
        walk = Walk(path, data, recovery, is_last=True)
        for _ in walk:
            pass
        torn = bytes(data[walk.end : walk.end + MAX_KEPT_BYTES]) if recovery.torn else b""
    walk.scan.data = b""  # the segment's file is closed now
    if check is not None:
        check(walk)
    header = walk.scan.header
    # The next segment's temporary path. A killed writer may have announced this segment in the footer, but
    # not yet renamed the file.
    begun = part_of(folder, recovery.next_sequence)
    is_open = not walk.scan.is_closed or walk.scan.follows is Follows.SEGMENT and begun.exists()
    closes = header is not None and is_open and len(recovery.cuts) <= bool(torn)
    try:
        if torn:
            with suppress(OSError):  # a full disk must not prevent the repair
                _keep(path.with_name(f"{path.name}.{walk.end}{CUT_SUFFIX}"), torn)
        if header is None and not walk.scan.footer.frames:
            path.unlink()
        elif torn or closes:
            footer = walk.scan.footer.pack(Follows.REPAIRED) if closes else b""
            _write_end(path, walk.end or HEADER_SIZE, footer)
            if closes:
                walk.scan.follows = Follows.REPAIRED  # `mark_continued` reads this value
    except OSError as error:
        raise LogError(f"{path} cannot be repaired: {error.strerror}") from None
    recovery.tail = walk
    return recovery


def mark_continued(path: Path, tail: Walk | None) -> None:
    """Record in the footer of the segment at `path` that another segment follows. Add a footer if there is
    none. A packed segment is complete and stays unchanged.

    `tail`: the walk from `repair_tail`, which saves reading the segment again. Raises OSError, CorruptLog.
    """
    if path.name.endswith(PACKED_SUFFIX):
        return
    walk = tail if tail is not None and tail.path == path else walk_segment(path)
    header, scan = walk.scan.header, walk.scan
    is_whole = len(walk.recovery.cuts) <= (walk.recovery.torn is not None)  # the torn tail is already cut off
    if is_whole and header is not None and scan.follows is not Follows.SEGMENT:
        _write_end(path, walk.end or HEADER_SIZE, scan.footer.pack(Follows.SEGMENT))


def _keep(path: Path, torn: bytes) -> None:
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb") as file:
        file.write(torn)


def _write_end(path: Path, size: int, end: bytes) -> None:
    """Cut a segment to `size` bytes and append `end`."""
    fd = open_file(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
        os.lseek(fd, size, os.SEEK_SET)
        if end and os.write(fd, end) != len(end):
            os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
