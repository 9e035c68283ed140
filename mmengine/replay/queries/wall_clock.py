"""Converts the times in a log to wall-clock time. Each segment's header contains the log's time and the
wall-clock time of the segment's first record.
"""

from bisect import bisect_right
from pathlib import Path

from mmengine.errors import MMEngineError
from mmengine.events.codec import Record, TornRecord
from mmengine.events.segment import Scan, open_segment, segment_paths

UNKNOWN = 0


class WallClock:
    """The wall-clock times of the log in a folder. A redacted log has no wall-clock times."""

    def __init__(self, folder: Path):
        self._first: list[int] = []  # The number of the first record in each readable segment.
        self._offsets: list[int] = []  # The wall-clock time minus the log's time in each segment, in ns.
        for path in segment_paths(folder):
            try:
                with open_segment(path) as data:
                    scan = Scan(data)
                    next(scan.frames(), None)
            except (MMEngineError, TornRecord):
                continue
            if scan.header is not None and scan.header.wall_ns:
                self._first.append(scan.header.first_sequence)
                self._offsets.append(scan.header.wall_ns - scan.header.mono_ns)

    def at(self, record: Record) -> int:
        """Return the record's Unix time in ns, or UNKNOWN."""
        place = bisect_right(self._first, record.sequence) - 1
        return UNKNOWN if place < 0 else max(UNKNOWN, record.mono_ns + self._offsets[place])
