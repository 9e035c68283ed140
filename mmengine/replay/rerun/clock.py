"""Puts a log's times on a single time axis. Several processes with unrelated clocks may have written the
log.
"""

from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record

MAX_NS = 2**60  # 36 years. With this limit, sums of times fit into 64 bits.


class SteadyClock:
    """Converts the times of records to ns since the first record.

    The time never goes back. The time between a process's end and the next process's start counts as zero.
    Raises ValueError for a time above MAX_NS.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._last_ns = 0

    def resume(self, offset_ns: int, last_ns: int) -> None:
        """Continue in the middle of a log. `offset_ns`: the difference between converted and logged times in
        the current process. `last_ns`: the last record's converted time.
        """
        self._offset_ns, self._last_ns = offset_ns, last_ns

    def of(self, record: Record) -> int:
        if self._offset_ns is None:
            self._offset_ns = -record.mono_ns
        if record.mono_ns + self._offset_ns < self._last_ns or isinstance(record.event, ev.Recovered):
            self._offset_ns = self._last_ns - record.mono_ns
        self._last_ns = record.mono_ns + self._offset_ns
        if self._last_ns > MAX_NS:
            raise ValueError(
                f"its time is {self._last_ns} ns after the log's first record; the limit is {MAX_NS}"
            )
        return self._last_ns
