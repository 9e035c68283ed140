"""Time over a whole log: the clocks of the processes that wrote it have nothing in common."""

from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record

MAX_NS = 2**60  # 36 years; so that sums of times fit 64 bits


class SteadyClock:
    """Ns since the first record that it was asked of. It never goes back; between a process and the one
    that recovered its log no time passes. Raises ValueError for a time that no log could reach."""

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._last_ns = 0

    def of(self, record: Record) -> int:
        if self._offset_ns is None:
            self._offset_ns = -record.mono_ns
        if record.mono_ns + self._offset_ns < self._last_ns or isinstance(record.event, ev.Recovered):
            self._offset_ns = self._last_ns - record.mono_ns
        self._last_ns = record.mono_ns + self._offset_ns
        if self._last_ns > MAX_NS:
            raise ValueError(f"it lies {self._last_ns} ns behind the log's first record")
        return self._last_ns
