"""How fast calls end: from it follows when one that was refused is likely to be taken."""

import time
from collections import deque
from collections.abc import Callable

MEASURED = 64  # calls that the rate is measured over
LONGEST_S = 60


class DrainRate:
    """Calls that were taken `begin`, and `end`. What is measured begins when one comes to a server that had
    none, so that idle hours do not count as slowness; a server whose calls do not end gets slower as it
    stands."""

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
            self._since = self._ends[0]  # it is let go
        self._ends.append(self._clock())

    def retry_after_s(self, num_ends: float = 1) -> int:
        """Seconds in which so many calls are likely to end: 1 to 60."""
        if not self.num_open:
            return 1
        mean_s = (self._clock() - self._since) / max(1, len(self._ends))
        return max(1, min(LONGEST_S, round(mean_s * num_ends)))
