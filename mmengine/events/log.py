"""The public classes for logs: LogWriter, LogReader, and MemoryLog, a log in memory.

A log on disk is a folder with segments (docs/reference/log-format.md).
"""

from collections import deque

from mmengine.events.codec import Record
from mmengine.events.reader import LogReader
from mmengine.events.vocabulary import Event, Executed, Queued
from mmengine.events.writer import LogWriter

__all__ = ["LogReader", "LogWriter", "MemoryLog", "Record"]
# Default limits of MemoryLog.
RING_RECORDS = 65536
RING_BYTES = 64 * 2**20


class MemoryLog:
    """Keeps the last records in memory, for an engine without a log folder. Nothing survives the process.

    `limit`: maximum number of records. `max_bytes`: maximum bytes of the records' prompts and sampled token
    ids. The newest record is always kept.
    """

    num_bytes, stalled = 0, ""

    def __init__(self, limit: int = RING_RECORDS, max_bytes: int = RING_BYTES):
        self.records: deque[Record] = deque()
        self._held_bytes = 0
        self._limit, self._max_bytes = limit, max_bytes
        self.next_sequence = 0

    def append(self, event: Event, step: int, mono_ns: int) -> None:
        self.records.append(Record(self.next_sequence, step, mono_ns, event))
        self.next_sequence += 1
        self._held_bytes += _column_bytes(event)
        while len(self.records) > max(1, self._limit if self._held_bytes <= self._max_bytes else 1):
            self._held_bytes -= _column_bytes(self.records.popleft().event)

    def commit(self) -> bool:
        return True

    def sync(self) -> None:
        """Do nothing, because the log is not on a disk."""

    def tidy(self) -> None:
        """Do nothing, because `append` drops old records."""

    def close(self) -> None:
        self.records.clear()


def _column_bytes(event: Event) -> int:
    """Return the byte size of EXECUTED's token ids or QUEUED's prompt, or 0 for other events."""
    if isinstance(event, Executed):
        return len(event.token_ids)
    return len(event.prompt) if isinstance(event, Queued) else 0
