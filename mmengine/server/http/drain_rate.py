"""Measures how many calls end per second. The server estimates Retry-After from this rate."""

import time
from collections import deque
from collections.abc import Callable

MEASURED = 64  # Maximum number of ended calls in the measurement.
LONGEST_S = 60


class DrainRate:
    """Measures how many open calls end per second.

    The measurement starts when a call comes to an idle server, so idle time does not lower the rate. While
    calls are open and none ends, the rate falls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._ends: deque[float] = deque(maxlen=MEASURED)
        self.num_open = 0

    def begin(self) -> None:
        if not self.num_open:
            self._since = self._clock()
            self._ends.clear()
        self.num_open += 1

    def end(self) -> None:
        self.num_open -= 1
        if len(self._ends) == MEASURED:
            # The append below drops the deque's oldest time, which becomes the start of the measurement.
            self._since = self._ends[0]
        self._ends.append(self._clock())

    def retry_after_s(self, num_ends: float = 1) -> int:
        """Return the estimated seconds until `num_ends` calls end, at least 1 and at most 60."""
        if not self.num_open:
            return 1
        mean_s = (self._clock() - self._since) / max(1, len(self._ends))
        return max(1, min(LONGEST_S, round(mean_s * num_ends)))
