"""What the outside asks of the engine, kept until a step sees it."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from mmengine.events import vocabulary as ev


class Source(Protocol):
    """Where a step finds arrivals, cancels and other observations."""

    def drain(self) -> Iterable[ev.Event]: ...

    def leavers(self) -> Iterable[ev.Event]:
        """Whom vLLM would let go before the result of the step that runs is applied. Asked for only
        where decisions are its own."""

    def __len__(self) -> int: ...


class Inbox:
    """A queue in memory, and the deadlines of what went through it. `clock` gives ns."""

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._events: deque[ev.Event] = deque()
        self._deadline_of: dict[str, int] = {}
        self._deadlines: list[tuple[int, str]] = []  # a heap; entries that `_deadline_of` denies are stale
        self.queued: set[str] = set()  # ids of arrivals that no step has seen yet

    def __len__(self) -> int:
        return len(self._events)

    def leavers(self) -> tuple[ev.Event, ...]:
        """Nobody: who leaves while a step runs is seen behind its result."""
        return ()

    def put(self, event: ev.Event) -> None:
        if isinstance(event, ev.Queued):
            self.queued.add(event.request_id)
            self.expect(event.request_id, event.deadline_ns)
        self._events.append(event)

    def expect(self, request_id: str, deadline_ns: int) -> None:
        """A request is to be given up so long from now; 0: never."""
        if deadline_ns:
            deadline = self._clock() + deadline_ns
            self._deadline_of[request_id] = deadline
            heapq.heappush(self._deadlines, (deadline, request_id))

    def ended(self, request_id: str) -> None:
        """A request is over: its deadline means nothing any more, also to a later one of that id."""
        self._deadline_of.pop(request_id, None)
        if len(self._deadlines) > 2 * len(self._deadline_of) + 64:
            self._deadlines = [(deadline, name) for name, deadline in self._deadline_of.items()]
            heapq.heapify(self._deadlines)

    def drain(self) -> list[ev.Event]:
        """Everything asked so far, then the deadlines that have passed."""
        events = list(self._events)
        self._events.clear()
        self.queued.clear()
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            deadline, name = heapq.heappop(self._deadlines)
            if self._deadline_of.get(name) == deadline:
                del self._deadline_of[name]
                events.append(ev.Cancelled(name, "deadline"))
        return events
