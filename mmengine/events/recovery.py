"""What to do with a log that is damaged, and what was lost by it.

    strict    any damage is refused
    tail      bytes at the very end that are no whole record do not count: a write was cut short
    salvage   damage in the middle is skipped too, where whole records stand behind it

A writer that continues a log cuts its tail first; damage in the middle is never written over.
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
MAX_KEPT_BYTES = 64 * 2**20  # of a torn tail
Mode = Literal["strict", "tail", "salvage"]


@dataclass(slots=True)
class Cut:
    """Bytes of a segment that do not count, and why. `num_lost`: records that are missing from
    `first_lost` on, as far as what follows tells; at a tail nothing follows, and it is 0."""

    path: Path
    offset: int
    num_bytes: int
    kind: str
    what: str
    first_lost: int
    num_lost: int = 0

    def __str__(self) -> str:
        lost = f"; {self.num_lost} records from {self.first_lost} on are lost" if self.num_lost else ""
        return f"{self.path.name}, byte {self.offset}: {self.num_bytes} bytes do not count, {self.what}{lost}"


@dataclass(slots=True)
class Recovery:
    """What a reader skipped, or a writer cut. `torn`: the one of the cuts that is a torn tail.
    `next_sequence`: of the record to be appended next. `is_closed`: the log ends with a footer, as one
    does whose writer closed it. `tail`: of a writer, the walk over the last segment."""

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
    """Raises LogError for a word that is no mode."""
    if mode not in get_args(Mode):
        raise LogError(f"{mode!r} is no recovery mode; use {', '.join(get_args(Mode))}")


class Walk:
    """Iterates over whole frames of the segment at `path`, in the mode of `recovery` and into it. `end`:
    where the last of them ended. Raises CorruptLog for what the mode does not forgive."""

    def __init__(self, path: Path, data: bytes | mmap.mmap, recovery: Recovery, *, is_last: bool):
        self.scan = Scan(data)
        self.end = 0
        self.path, self.recovery, self._is_last = path, recovery, is_last
        self._skipped: Cut | None = None  # what the next frame tells the loss of

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
            raise CorruptLog(f"{self.path.name} has no footer: it is not known to be whole", "truncated")

    def _skip(self, error: TornRecord | DamagedRecord) -> int | None:
        """Where to go on behind damage; None: nothing whole follows in the segment."""
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
        """Whether to take a frame that is not the next one. Only a salvage does."""
        recovery = self.recovery
        missing = frame.sequence - recovery.next_sequence
        what = (
            f"record {frame.sequence} stands where record {recovery.next_sequence} belongs; records are "
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
    """A walk over a whole segment, whatever is wrong in it, as over the last one of a log. Raises CorruptLog,
    LogError as `open_segment` does, CorruptLog for what a newer build wrote."""
    with open_segment(path) as data:
        walk = Walk(path, data, Recovery("salvage", next_sequence=first_sequence_of(path)), is_last=True)
        for _ in walk:
            pass
    return walk


def repair_tail(folder: Path, mode: Mode, check: Callable[[Walk], None] | None = None) -> Recovery:
    """Make a log ready to be continued in another segment: cut what is torn off its last one, close
    that with a footer, and say what is gone.

    The caller holds the lock. Earlier segments are not looked at. `check` sees the last one before it is
    changed, and may raise. Cut bytes (the first 64 MiB of them)
    are kept beside the segment in a file ending in .cut, where the disk has room. Raises
    CorruptLog for what `mode` does not forgive, LogError when the disk refuses.
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
    walk.scan.data = b""  # its file is closed
    if check is not None:
        check(walk)
    header = walk.scan.header
    begun = part_of(folder, recovery.next_sequence)  # that the footer promises, and no more
    is_open = not walk.scan.is_closed or walk.scan.follows is Follows.SEGMENT and begun.exists()
    closes = header is not None and is_open and len(recovery.cuts) <= bool(torn)
    try:
        if torn:
            with suppress(OSError):  # a full disk must not keep the log from being repaired
                _keep(path.with_name(f"{path.name}.{walk.end}{CUT_SUFFIX}"), torn)
        if header is None and not walk.scan.footer.frames:
            path.unlink()
        elif torn or closes:
            footer = walk.scan.footer.pack(Follows.REPAIRED) if closes else b""
            _write_end(path, walk.end or HEADER_SIZE, footer)
            if closes:
                walk.scan.follows = Follows.REPAIRED  # what `mark_continued` finds
    except OSError as error:
        raise LogError(f"{path} cannot be repaired: {error.strerror}") from None
    recovery.tail = walk
    return recovery


def mark_continued(path: Path, tail: Walk | None) -> None:
    """Let the footer of a segment that another process wrote say that another one follows; write one where
    there is none. `tail`: of the repair, so that one that it walked over is not read again. Packed
    segments said it before they were packed. Raises OSError, CorruptLog."""
    if path.name.endswith(PACKED_SUFFIX):
        return
    walk = tail if tail is not None and tail.path == path else walk_segment(path)
    header, scan = walk.scan.header, walk.scan
    is_whole = len(walk.recovery.cuts) <= (walk.recovery.torn is not None)  # what was torn is cut off
    if is_whole and header is not None and scan.follows is not Follows.SEGMENT:
        _write_end(path, walk.end or HEADER_SIZE, scan.footer.pack(Follows.SEGMENT))


def _keep(path: Path, torn: bytes) -> None:
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb") as file:
        file.write(torn)


def _write_end(path: Path, size: int, end: bytes) -> None:
    """Cut a segment to `size` bytes and write its end."""
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
