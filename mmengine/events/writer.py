"""Writes a log, with one `write` call for each commit. The engine commits a step's events before the step has
any effect outside the process.

On a full disk `os.write` writes only some of the bytes and raises no error. The writer then truncates the
file to the previous commit, releases its reserved disk space, and writes again. While the writer uses the
reserve or cannot write at all, `stalled` returns the reason. New requests are then refused, and running
requests continue as long as the reserve lasts.
"""

import errno
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events.codec import HEADER, encode
from mmengine.events.file_system import open_file, sync_data, sync_folder
from mmengine.events.lock import lock
from mmengine.events.log_end import check_end
from mmengine.events.log_place import LogPlace
from mmengine.events.recovery import Mode, Recovery, mark_continued, repair_tail
from mmengine.events.reserve import FULL, RESERVE_BYTES, Reserve
from mmengine.events.retention import FullSegments, Retention, Undelivered
from mmengine.events.segment import (
    FOOTER_SIZE,
    HEADER_SIZE,
    Follows,
    Footer,
    Header,
    first_sequence_of,
    part_of,
    segment_name,
    segment_paths,
)
from mmengine.events.snapshots import drop_behind
from mmengine.events.vocabulary import NUMBERS, Event
from mmengine.version import __version__

SEGMENT_BYTES = 64 * 2**20
# Maximum number of frames in a segment. A process that continues a log reads the last segment frame by frame.
SEGMENT_FRAMES = 2**16
NO_FILE = -1  # no file is open
KEEP_ALL = Retention()
TIDY_S, TIDY_AGAIN_S = 1.0, 10.0  # seconds to the next run of `tidy`, after a success and after an error


class LogWriter:
    """Appends to a new log or, with the recovery mode `reopen`, to an existing log. For an existing log,
    `recovery` describes the bytes that were truncated at the log's end.

    `sync_always`: call fdatasync at each commit, so that commits survive power cuts. `segment_bytes`: the
    size at which a segment is full. `tidy` packs full segments unless `pack_full` is False, and deletes old
    segments according to `retention`. `wall_ns`: returns the wall-clock time for segment headers. Raises
    LogError if the folder cannot be used, has another writer, or contains a log and `reopen` is None. Raises
    CorruptLog for damage that `reopen` does not tolerate.
    """

    def __init__(
        self,
        folder: Path,
        *,
        reopen: Mode | None = None,
        sync_always: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        pack_full: bool = True,
        retention: Retention = KEEP_ALL,
        reserve_bytes: int = RESERVE_BYTES,
        wall_ns: Callable[[], int] = time.time_ns,
    ):
        self._folder = folder
        self._sync_always, self._segment_bytes = sync_always, segment_bytes
        self._wall_ns = wall_ns
        self._pending: list[tuple[int, int, int, Event]] = []
        self._path: Path | None = None
        self._fd = NO_FILE
        self._size = 0
        self._torn = False  # whether the file may have uncommitted bytes after `_size`
        self._footer = Footer()  # counters over the committed frames in the segment
        self._is_closed = False  # whether the segment has its footer
        self._full = FullSegments(folder, retention, packs=pack_full)
        self._retention, self._undelivered = retention, Undelivered()
        self._knows = True  # whether the previous process's undelivered requests are known
        self._tidy_at = 0.0
        self._stalled = ""
        self._is_stuck = False  # whether the last commit could not be written
        self.num_bytes = 0
        self.next_sequence = 0
        self.recovery: Recovery | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = lock(folder)
            self._place = LogPlace(folder / "lock", self._lock)
        except OSError as error:
            what = f"no log can be written in {folder}: {error.strerror}"
            raise LogError(f"{what}; name another folder") from None
        try:
            self._continue(reopen)
            self._reserve = Reserve(folder, reserve_bytes)
        except BaseException:
            os.close(self._lock)
            raise
        if not self._reserve.is_held:
            self._stalled = self._on_reserve()

    def _continue(self, reopen: Mode | None) -> None:
        paths = segment_paths(self._folder)
        if not reopen:
            if paths:
                raise LogError(
                    f"{self._folder} has a log already; name another folder, or move that log away"
                )
            return
        self.recovery = repair_tail(self._folder, reopen, None if reopen == "salvage" else check_end)
        self.next_sequence = self.recovery.next_sequence
        drop_behind(self._folder, self.next_sequence)
        for part in self._folder.glob("[0-9]*.part"):  # files that a killed process left
            if part != part_of(self._folder, self.next_sequence):
                part.unlink(missing_ok=True)
        # A segment that begins with the next record's number has no records. The first new segment replaces
        # this segment.
        paths = [path for path in segment_paths(self._folder) if path.stem != f"{self.next_sequence:020d}"]
        self._path = paths[-1] if paths else None
        for path, after in pairwise(paths):
            self._full.add(path, first_sequence_of(after))
        self._knows = not paths

    def expect(self, undelivered: Undelivered) -> None:
        """Set a continued log's undelivered requests. Before this call, the writer deletes no segment of the
        log.
        """
        self._undelivered, self._knows = undelivered, True

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self._pending.append((NUMBERS[type(event)], step, mono_ns, event))
        if self._retention:
            self._undelivered.see(event, self.next_sequence)
        self.next_sequence += 1

    def commit(self) -> bool:
        """Write the appended records. Returns False if they cannot be written, for example on a full disk.
        The next call tries again.
        """
        if not self._pending:
            return True
        if self._place.lost():
            return False
        frames = encode(self._pending, self.next_sequence - len(self._pending))
        try:
            try:
                self._store(frames)
            except OSError as error:
                if error.errno not in FULL or not self._reserve.is_held:
                    raise
                self._stalled = self._on_reserve()
                self._reserve.release()
                self._store(frames)
        except OSError as error:
            self._stalled = f"the log in {self._folder} cannot be written: {error.strerror}"
            self._is_stuck = True
            with suppress(OSError):  # the next commit truncates again
                self._cut()
            return False
        self._pending.clear()
        self._is_stuck = False
        if self._stalled:
            self._look_for_room()
        return True

    @property
    def stalled(self) -> str:
        """The reason why new requests must be refused, or "". Each call checks the disk space and the
        folder.
        """
        if lost := self._place.lost():
            return lost
        if self._stalled and not self._is_stuck:
            self._look_for_room()
        return self._stalled

    def _look_for_room(self) -> None:
        if self._reserve.is_held or self._reserve.take_back():
            self._stalled = ""
        else:
            self._stalled = self._on_reserve()

    def _on_reserve(self) -> str:
        return (
            f"the disk of the log in {self._folder} is full: {os.strerror(errno.ENOSPC)}; running requests "
            "continue on reserved disk space"
        )

    def _store(self, frames: list[bytes]) -> None:
        """Write the frames of one commit with a single write. If the current segment is full, first begin a
        new segment. If OSError is raised, none of the frames is part of the log.
        """
        num_bytes = sum(map(len, frames))
        frames_in = self._footer.frames
        is_long = frames_in and self._size + num_bytes + FOOTER_SIZE > self._segment_bytes
        is_full = is_long or frames_in >= SEGMENT_FRAMES
        if self._fd == NO_FILE or self._is_closed or is_full:
            self._open_segment()
        self._write(b"".join(frames))
        for frame in frames:
            _, crc, _, *rest = HEADER.unpack_from(frame)
            self._footer.add(crc, *rest)

    def _write(self, data: bytes) -> None:
        """Write all bytes in `data`. If OSError is raised, the next call first truncates the file to its
        committed bytes.

        A failed sync also leads to this truncation, because a second sync could succeed although the bytes
        never reached the disk.
        """
        self._cut()
        self._torn = True
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._sync_always:
            sync_data(self._fd)
        self._torn = False
        self._size += len(data)
        self.num_bytes += len(data)

    def _cut(self) -> None:
        """Truncate the segment to its committed bytes."""
        if self._torn:
            os.ftruncate(self._fd, self._size)
            self._torn = False

    def _close_segment(self, follows: Follows) -> None:
        """Write the footer if the segment has none, and sync the segment to the disk. Raises OSError."""
        if not self._is_closed:
            self._write(self._footer.pack(follows))
            self._is_closed = True
        sync_data(self._fd)

    def _open_segment(self) -> None:
        """Begin the next segment. If OSError is raised, the next call tries again.

        The new segment's header is synced before the previous segment's footer announces the new segment.
        Otherwise a kill between both writes would make a segment seem missing.
        """
        first = self.next_sequence - len(self._pending)
        path, part = self._folder / segment_name(first), part_of(self._folder, first)
        begin = Header(first, self._wall_ns(), self._pending[0][2], __version__).pack()
        _write_whole(part, begin)
        if self._fd != NO_FILE:
            self._close_segment(Follows.SEGMENT)
        elif self._path is not None:
            mark_continued(self._path, self.recovery.tail if self.recovery is not None else None)
        os.replace(part, path)
        sync_folder(self._folder)
        fd = open_file(path, os.O_WRONLY | os.O_APPEND)
        self._place.watch(path, fd)
        full, self._fd, self._size, self._is_closed = self._fd, fd, HEADER_SIZE, False
        self._footer = Footer(chain=zlib.crc32(begin[-4:]))
        self.num_bytes += HEADER_SIZE
        if full != NO_FILE:
            os.close(full)
        if self._path is not None:
            self._full.add(self._path, first)
        self._path = path

    def sync(self) -> None:
        """Sync the committed records to the disk. Any thread may call this method."""
        fd = self._fd
        if fd != NO_FILE:
            try:
                sync_data(fd)
            except OSError as error:
                # EBADF: another thread has synced and closed the full segment meanwhile.
                if error.errno != errno.EBADF:
                    raise

    def tidy(self) -> None:
        """Delete segments beyond the retention, and pack one full segment. Any thread may call this method,
        but only one at a time. After a disk error a later call tries again.
        """
        now = time.monotonic()
        if now < self._tidy_at or not (self._full.waits_for_packing or self._retention):
            return
        self._tidy_at = now + TIDY_S
        try:
            self._let_go()
            if not self._stalled:  # packing temporarily needs additional disk space
                self._full.pack_one()
        except (OSError, LogError):
            self._tidy_at = now + TIDY_AGAIN_S

    def _let_go(self) -> None:
        if self._retention and self._knows:
            self._full.let_go(self._undelivered.oldest, self._size)

    def close(self) -> None:
        """Commit, write the footer, tidy, and unlock the folder. Later calls do nothing. Raises LogError if
        appended records cannot be written.
        """
        if self._lock == NO_FILE:
            return
        whole, lost, stalled = self.commit(), len(self._pending), self.stalled
        try:
            if self._fd != NO_FILE:
                self._end()
            with suppress(OSError, LogError):  # after an error, the next writer tidies
                self._let_go()
                while self._full.waits_for_packing and not self._stalled:
                    self._full.pack_one()
        except OSError as error:
            raise LogError(f"the log in {self._folder} could not be synced: {error.strerror}") from None
        finally:
            for fd in (self._fd, self._lock):
                if fd != NO_FILE:
                    os.close(fd)
            self._fd = self._lock = NO_FILE
            self._reserve.release()
        if not whole:
            raise LogError(f"{stalled}; its last {lost} records are lost")

    def _end(self) -> None:
        """Write the last segment's footer if the disk has space for it. Without the footer the log counts as
        not closed, but no record is lost.
        """
        try:
            if self._footer.frames:
                self._close_segment(Follows.NOTHING)
        except OSError:
            self._reserve.release()
            self._cut()
            sync_data(self._fd)


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file with these bytes, and sync it to the disk. Raises OSError."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync_data(fd)
    finally:
        os.close(fd)
