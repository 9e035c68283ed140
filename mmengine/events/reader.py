"""Reads a log: yields all records in a folder, in order."""

from collections.abc import Iterator
from contextlib import ExitStack
from mmap import mmap
from pathlib import Path

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import Frame, Record, UnknownRecord, records_in
from mmengine.events.recovery import Cut, Mode, Recovery, Walk, check_mode
from mmengine.events.segment import SUFFIX, first_sequence_of, open_segment, segment_paths, snapshot_sequences


class LogReader:
    """Iterates over the records in a folder, from record `start` on.

    Damage that `mode` does not tolerate raises CorruptLog with the file and the byte. `recovery` lists the
    skipped damage. `torn` is the torn tail (incomplete bytes at the log's end), if it was skipped. If old
    segments were deleted, the log begins with the record `first_sequence`, and a snapshot holds the state
    before this record. Raises LogError if there is no log.
    """

    def __init__(self, folder: Path, mode: Mode = "tail", start: int = 0):
        check_mode(mode)
        self.paths = segment_paths(folder)
        if not self.paths:
            raise LogError(f"{folder} has no log: no file there ends in {SUFFIX}")
        self.num_bytes = sum(path.stat().st_size for path in self.paths if path.exists())
        self.first_sequence = first_sequence_of(self.paths[0])
        self.recovery = Recovery(mode)
        self._start = start
        if self.first_sequence and mode != "salvage":
            snapshots = snapshot_sequences(folder)
            if not snapshots or snapshots[-1] < self.first_sequence - 1:
                raise CorruptLog(
                    f"the log begins with record {self.first_sequence}, and no snapshot holds the "
                    "state before it; records are missing",
                    "gap",
                )

    @property
    def torn(self) -> Cut | None:
        """The bytes at the log's end that are not a complete record, or None. Valid after the iteration."""
        return self.recovery.torn

    def __iter__(self) -> Iterator[Record]:
        paths = self.paths[self._first_needed() :]
        self.recovery = Recovery(self.recovery.mode, next_sequence=first_sequence_of(paths[0]))
        for path in paths:
            yield from self._segment(path, is_last=path == paths[-1])

    def _first_needed(self) -> int:
        """Return the index of the segment that contains record `start`."""
        if not self._start:
            return 0
        later = [number for number, path in enumerate(self.paths) if first_sequence_of(path) <= self._start]
        return later[-1] if later else 0

    def _segment(self, path: Path, *, is_last: bool) -> Iterator[Record]:
        start = self._start
        with ExitStack() as stack:
            try:
                data = stack.enter_context(open_segment(path))
            except CorruptLog as error:
                self._leave_out(path, error)
                return
            for frame in Walk(path, data, self.recovery, is_last=is_last):
                if frame.sequence + frame.count <= start:
                    continue
                records = records_of(path, data, frame)
                if frame.sequence < start:
                    records = records[start - frame.sequence :]
                yield from records

    def _leave_out(self, path: Path, error: CorruptLog) -> None:
        """In the mode salvage, skip a segment that cannot be unpacked. In other modes, raise the error."""
        if self.recovery.mode != "salvage":
            raise error
        size, first = path.stat().st_size, self.recovery.next_sequence
        self.recovery.cuts.append(Cut(path, 0, size, error.kind, str(error), first))


def records_of(path: Path, data: bytes | mmap, frame: Frame) -> list[Record]:
    """Return the records in a frame. Raises CorruptLog for a record that this build cannot read."""
    try:
        return records_in(data, frame)
    except UnknownRecord as error:
        raise CorruptLog(f"{path.name}: {error}", error.kind) from None
