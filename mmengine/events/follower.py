"""Reads a log while another process writes it, and waits for new records."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mmengine.errors import CorruptLog, LogError
from mmengine.events.codec import DamagedRecord, Record, TornRecord
from mmengine.events.reader import records_of
from mmengine.events.segment import Scan, first_sequence_of, open_segment, segment_paths

NO_SEGMENT = -1  # no segment was read yet


class LogFollower:
    """Iterates over the records in a folder, and continues with records that the writer appends. The
    iteration begins with the segment that contains record `start`.

    If there are no more records, the follower calls `wait`, and ends if `wait` returns False. Incomplete
    bytes at the log's end are read again later, because the writer may complete them. Raises CorruptLog for a
    missing record, and for damage before the last segment.
    """

    torn = None  # always None, because an incomplete end may become complete (see LogReader in reader.py)

    def __init__(self, folder: Path, wait: Callable[[], bool], start: int = 0):
        self._folder, self._wait, self._start = folder, wait, start
        self._segment = NO_SEGMENT  # current segment's first record number; packing changes the file name
        self._offset: int | None = None
        self._next = 0

    def __iter__(self) -> Iterator[Record]:
        while True:
            for path in self._paths():
                first = first_sequence_of(path)
                if first > self._segment:
                    if self._segment != NO_SEGMENT and first != self._next:
                        raise CorruptLog(f"record {self._next} is missing before {path.name}", "gap")
                    self._segment, self._offset, self._next = first, None, first
                if first == self._segment:
                    try:
                        yield from self._rest_of(path)
                    except LogError:
                        if path.exists():
                            raise
                        break  # the segment was packed just now, so its file has another name
            if not self._wait():
                return

    def _paths(self) -> list[Path]:
        paths = segment_paths(self._folder)
        if self._segment != NO_SEGMENT:
            return paths
        behind = [place for place, path in enumerate(paths) if first_sequence_of(path) <= self._start]
        return paths[behind[-1] :] if behind else paths

    def _rest_of(self, path: Path) -> Iterator[Record]:
        with open_segment(path) as data:
            scan = Scan(data)
            try:
                for frame in scan.frames(self._offset):
                    if frame.sequence != self._next:
                        raise CorruptLog(f"{path.name}: record {self._next} is missing", "gap")
                    records = records_of(path, data, frame)
                    self._offset, self._next = frame.end, frame.sequence + frame.count
                    yield from records
            except (TornRecord, DamagedRecord) as error:
                if any(first_sequence_of(other) > self._segment for other in segment_paths(self._folder)):
                    raise CorruptLog(f"{path.name}: {error}") from None
