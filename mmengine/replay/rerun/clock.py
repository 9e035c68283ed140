"""A time axis for a whole log, although the processes that wrote the log have unrelated clocks."""

from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record

MAX_NS = 2**60  # 36 years, so that sums of times fit 64 bits.


class SteadyClock:
    """Converts record times to ns since the first record.

    The time never goes back. No time passes between a process's end and the start in which its log was
    recovered. Raises ValueError for a time above MAX_NS.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None
        self._last_ns = 0

    def resume(self, offset_ns: int, last_ns: int) -> None:
        """Continue in the middle of a log: `offset_ns` is added to the process's times, and `last_ns` is the
        time so far.
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
