"""Keeps the last seconds of events in memory. A base is a point where a log can begin."""

from collections import deque

from mmengine_vllm.bases import Base, Written, size_of

RING_BYTES = 256 * 2**20


class Ring:
    """Bases and the events after them, for at least the last `seconds` seconds. Beyond RING_BYTES, the ring
    drops the oldest bases and their events, but always keeps the newest base.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._bases: deque[Base] = deque()

    def is_due(self, ns: int) -> bool:
        """Return whether the caller should add a base."""
        return not self._bases or ns - self._bases[-1].ns > self._seconds / 2 * 1e9

    def begin(self, base: Base) -> None:
        """Add a base, and drop events that are too old."""
        self._bases.append(base)
        while len(self._bases) > 1 and base.ns - self._bases[1].ns >= self._seconds * 1e9:
            self._bases.popleft()

    def write(self, events: Written) -> None:
        """Add events after the newest base."""
        if not self._bases:
            return
        newest = self._bases[-1]
        newest.later += events
        newest.num_bytes += sum(size_of(event) for event, _, _ in events)
        while len(self._bases) > 1 and sum(base.num_bytes for base in self._bases) > RING_BYTES:
            self._bases.popleft()

    @property
    def is_whole(self) -> bool:
        """Whether the ring contains all events since the scheduler's start."""
        return bool(self._bases) and not self._bases[0].events

    def contents(self) -> Written:
        """Return the ring's events as a log from the oldest base. The caller must write STARTED first."""
        if not self._bases:
            return []
        oldest = self._bases[0]
        items = oldest.items()
        events = [(event, step, oldest.ns) for event, step in oldest.events]
        for base in self._bases:
            for event, step, ns in base.later:
                if (adapted := items.adapted(event)) is not None:
                    events.append((adapted, max(0, step + oldest.shift), ns))
        return events
