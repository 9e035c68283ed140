"""What the outside asks of the engine, kept until a step sees it."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from mmengine.core.observer import Observer
from mmengine.core.state.request_state import DEADLINE
from mmengine.core.state.sessions import IDLE
from mmengine.events import vocabulary as ev


class Source(Protocol):
    """Where a step finds arrivals, cancels and other observations."""

    def drain(self) -> Iterable[ev.Event]: ...

    def leavers(self) -> Iterable[ev.Event]:
        """Whom vLLM would let go before the result of the step that runs is applied. Asked for only
        where decisions are its own."""

    def __len__(self) -> int: ...


class Deadlines:
    """Of one thing for each request; a later one takes the place of the one before. `clock` gives ns."""

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._of: dict[str, int] = {}
        self._all: list[tuple[int, str]] = []  # a heap; entries that `_of` denies are stale

    def expect(self, request_id: str, within_ns: int) -> None:
        deadline = self._clock() + within_ns
        self._of[request_id] = deadline
        heapq.heappush(self._all, (deadline, request_id))

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)
        if len(self._all) > 2 * len(self._of) + 64:
            self._all = [(deadline, name) for name, deadline in self._of.items()]
            heapq.heapify(self._all)

    @property
    def next_ns(self) -> int | None:
        """The next deadline, by the clock."""
        while self._all and self._of.get(self._all[0][1]) != self._all[0][0]:
            heapq.heappop(self._all)
        return self._all[0][0] if self._all else None

    @property
    def any_passed(self) -> bool:
        following = self.next_ns
        return following is not None and following <= self._clock()

    def passed(self) -> Iterator[str]:
        """Whose deadline is over; each is named once."""
        while self._all and self._all[0][0] <= self._clock():
            deadline, name = heapq.heappop(self._all)
            if self._of.get(name) == deadline:
                del self._of[name]
                yield name


class Inbox(Observer):
    """A queue in memory with the deadlines of the requests that passed through it. `clock` gives ns."""

    def __init__(self, clock: Callable[[], int]):
        self._events: deque[ev.Event] = deque()
        self._deadlines = Deadlines(clock)
        self._of_store = Deadlines(clock)
        self._of_sessions = Deadlines(clock)
        self.opening: dict[str, ev.SessionOpened] = {}  # sessions that no step has seen yet
        self.closing: set[str] = set()  # sessions, likewise
        self.appending: set[str] = set()  # sessions with a request that no step has seen yet
        self.queued: set[str] = set()  # ids of arrivals that no step has seen yet

    def __len__(self) -> int:
        return len(self._events) + self._of_sessions.any_passed

    def leavers(self) -> tuple[ev.Event, ...]:
        """Nobody: who leaves while a step runs is seen behind its result."""
        return ()

    def put(self, event: ev.Event) -> None:
        if isinstance(event, ev.Queued):
            self.queued.add(event.request_id)
            self.expect(event.request_id, event.deadline_ns)
        elif isinstance(event, ev.SessionOpened):
            self.opening[event.session_id] = event
        elif isinstance(event, ev.SessionClosed):
            self.closing.add(event.session_id)
        elif isinstance(event, ev.Appended):
            self.appending.add(event.session_id)
        self._events.append(event)

    def expect(self, request_id: str, deadline_ns: int) -> None:
        """A request is to be given up so long from now; 0: never."""
        if deadline_ns:
            self._deadlines.expect(request_id, deadline_ns)

    def expect_store(self, request_id: str, within_ns: int) -> None:
        """A store is to say something of a request so long from now."""
        self._of_store.expect(request_id, within_ns)

    def forget_store(self, request_id: str) -> None:
        """It did, or nobody waits for it any more."""
        self._of_store.forget(request_id)

    def expect_session(self, session_id: str, idle_ns: int) -> None:
        """Somebody is to ask a session something so long from now; 0: never."""
        if idle_ns:
            self._of_sessions.expect(session_id, idle_ns)

    def forget_session(self, session_id: str) -> None:
        """Somebody did, or it is over."""
        self._of_sessions.forget(session_id)

    @property
    def next_idle_ns(self) -> int | None:
        """When the next session has been idle for too long, by the clock; None: none will be."""
        return self._of_sessions.next_ns

    def after(self, event: ev.Event) -> None:
        """Forget the deadlines of a request that ended, so that a later request may have its id."""
        if isinstance(event, ev.Finished):
            self._deadlines.forget(event.request_id)
            self._of_store.forget(event.request_id)

    def drain(self) -> list[ev.Event]:
        """Everything asked so far, then the deadlines that have passed."""
        events = [
            self._events.popleft() for _ in range(len(self._events))
        ]  # other threads put some meanwhile
        for seen in (self.queued, self.opening, self.closing, self.appending):
            seen.clear()
        events += [ev.Lost(name, DEADLINE) for name in self._of_store.passed()]
        events += [ev.Cancelled(name, ev.DEADLINE) for name in self._deadlines.passed()]
        events += [ev.SessionClosed(name, IDLE) for name in self._of_sessions.passed()]
        return events
