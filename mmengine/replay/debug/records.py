"""Reads a log's records from any position. Unlike LogReader, which begins at a segment's first record, this
reader skips the frames (groups of records) before the position.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

from mmengine.errors import CorruptLog
from mmengine.events.codec import DamagedRecord, Record, TornRecord, UnknownRecord
from mmengine.events.reader import records_of
from mmengine.events.segment import HEADER_SIZE, Scan, find_whole, first_sequence_of, open_segment

MAX_UNPACKED = 2  # Maximum number of unpacked segments in memory, of at most 128 MiB each.


class RecordFile:
    """A log's segments, with a cache of unpacked segments."""

    def __init__(self, paths: list[Path]):
        self._paths = paths
        self._firsts = [first_sequence_of(path) for path in paths]
        self._unpacked: dict[Path, bytes] = {}  # The most recently used segment is last.

    def records(self, position: int, offset: int = 0) -> Iterator[Record]:
        """Yield the records from `position` on. `offset`: a frame's byte offset in the segment that contains
        the record `position`; 0 if unknown. The frame must not begin after this record.

        Ends at a torn tail. Raises CorruptLog for damage before the tail.
        """
        first = max(0, bisect_right(self._firsts, position) - 1)
        for number in range(first, len(self._paths)):
            path = self._paths[number]
            with self._opened(path) as data:
                yield from self._segment(path, data, position, offset if number == first else 0)

    def _segment(self, path: Path, data: bytes | mmap, position: int, offset: int) -> Iterator[Record]:
        end, expected = offset or HEADER_SIZE, -1
        try:
            for frame in Scan(data).frames(offset or None):
                end = frame.end
                if expected not in (-1, frame.sequence):
                    text = f"record {frame.sequence} was found instead of record {expected}"
                    raise CorruptLog(f"{path.name}, byte {frame.offset}: {text}", "gap")
                expected = frame.sequence + frame.count
                if expected > position:
                    records = records_of(path, data, frame)
                    yield from records[max(0, position - frame.sequence) :]
        except UnknownRecord as error:
            raise CorruptLog(f"{path.name}: {error}", error.kind) from None
        except (TornRecord, DamagedRecord) as error:
            if path != self._paths[-1] or find_whole(data, end + 1) is not None:
                raise CorruptLog(f"{path.name}: {error}", getattr(error, "kind", "truncated")) from None

    @contextmanager
    def _opened(self, path: Path) -> Iterator[bytes | mmap]:
        if path in self._unpacked:
            self._unpacked[path] = self._unpacked.pop(path)
            yield self._unpacked[path]
            return
        with open_segment(path) as data:
            if isinstance(data, bytes):
                self._unpacked[path] = data
                while len(self._unpacked) > MAX_UNPACKED:
                    del self._unpacked[next(iter(self._unpacked))]
            yield data
