"""What the outside asks of the engine, kept until a step sees it."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from mmengine.events import vocabulary as ev


class Source(Protocol):
    """Where a step finds arrivals, cancels and other observations."""

    def drain(self) -> Iterable[ev.Event]: ...

    def __len__(self) -> int: ...


class Inbox:
    """A queue in memory, and the deadlines of what went through it. `clock` gives ns."""

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._events: deque[ev.Event] = deque()
        self._deadlines: list[tuple[int, str]] = []
        self.queued: set[str] = set()  # ids of arrivals that no step has seen yet

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: ev.Event) -> None:
        if isinstance(event, ev.Queued):
            self.queued.add(event.request_id)
            if event.deadline_ns:
                heapq.heappush(self._deadlines, (self._clock() + event.deadline_ns, event.request_id))
        self._events.append(event)

    def drain(self) -> list[ev.Event]:
        """Everything asked so far, then the deadlines that have passed."""
        events = list(self._events)
        self._events.clear()
        self.queued.clear()
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            events.append(ev.Cancelled(heapq.heappop(self._deadlines)[1], "deadline"))
        return events
