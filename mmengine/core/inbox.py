"""An engine loop's inbox. It stores arrivals, cancellations and deadlines until a step reads them."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from mmengine.core.observer import Observer
from mmengine.core.state.request_state import DEADLINE
from mmengine.core.state.sessions import IDLE
from mmengine.events import vocabulary as ev


class Source(Protocol):
    """A source of observations for the loop: arrivals, cancellations and other events from outside."""

    def drain(self) -> Iterable[ev.Event]: ...

    def leavers(self) -> Iterable[ev.Event]:
        """Return the events that end requests before the running step's result is applied.

        Only vLLM's scheduling rules use this method.
        """

    def __len__(self) -> int: ...


class Deadlines:
    """The deadlines of requests or sessions. A new deadline replaces the earlier deadline of the same id.
    `clock`: returns the time in ns.
    """

    def __init__(self, clock: Callable[[], int]):
        self._clock = clock
        self._of: dict[str, int] = {}
        self._all: list[tuple[int, str]] = []  # a heap; an item that differs from `_of` is outdated

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
        """The time of the next deadline in ns, or None."""
        while self._all and self._of.get(self._all[0][1]) != self._all[0][0]:
            heapq.heappop(self._all)
        return self._all[0][0] if self._all else None

    @property
    def any_passed(self) -> bool:
        following = self.next_ns
        return following is not None and following <= self._clock()

    def passed(self) -> Iterator[str]:
        """Yield the ids whose deadlines have passed, and remove these deadlines."""
        while self._all and self._all[0][0] <= self._clock():
            deadline, name = heapq.heappop(self._all)
            if self._of.get(name) == deadline:
                del self._of[name]
                yield name


class Inbox(Observer):
    """A queue of observations in memory. For each passed deadline the inbox adds an event. Deadlines apply to
    requests, replies from block stores, and idle sessions. `clock`: returns the time in ns.
    """

    def __init__(self, clock: Callable[[], int]):
        self._events: deque[ev.Event] = deque()
        self._deadlines = Deadlines(clock)
        self._of_store = Deadlines(clock)
        self._of_sessions = Deadlines(clock)
        self.opening: dict[str, ev.SessionOpened] = {}  # new sessions that no step has processed yet
        self.closing: set[str] = set()  # closed sessions that no step has processed yet
        self.appending: set[str] = set()  # sessions whose new request no step has processed yet
        self.queued: set[str] = set()  # ids of arrivals that no step has processed yet

    def __len__(self) -> int:
        return len(self._events) + self._of_sessions.any_passed

    def leavers(self) -> tuple[ev.Event, ...]:
        """Return no events: a cancelled request ends only after the running step's result is applied."""
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
        """Cancel the request after `deadline_ns`, unless the request has ended. 0: never."""
        if deadline_ns:
            self._deadlines.expect(request_id, deadline_ns)

    def expect_store(self, request_id: str, within_ns: int) -> None:
        """Make the request stop waiting for the block store after `within_ns`."""
        self._of_store.expect(request_id, within_ns)

    def forget_store(self, request_id: str) -> None:
        """Remove the deadline for the block store's reply to this request."""
        self._of_store.forget(request_id)

    def expect_session(self, session_id: str, idle_ns: int) -> None:
        """Close a session after it was idle for `idle_ns`. 0: never."""
        if idle_ns:
            self._of_sessions.expect(session_id, idle_ns)

    def forget_session(self, session_id: str) -> None:
        """Remove the session's idle deadline."""
        self._of_sessions.forget(session_id)

    @property
    def next_idle_ns(self) -> int | None:
        """The time in ns at which the next idle session is closed, or None."""
        return self._of_sessions.next_ns

    def after(self, event: ev.Event) -> None:
        """Remove an ended request's deadlines, because a later request may use the same id."""
        if isinstance(event, ev.Finished):
            self._deadlines.forget(event.request_id)
            self._of_store.forget(event.request_id)

    def drain(self) -> list[ev.Event]:
        """Remove and return all events in the inbox, followed by one event for each passed deadline."""
        # Another thread may add events while this line runs.
        events = [self._events.popleft() for _ in range(len(self._events))]
        for seen in (self.queued, self.opening, self.closing, self.appending):
            seen.clear()
        events += [ev.Lost(name, DEADLINE) for name in self._of_store.passed()]
        events += [ev.Cancelled(name, ev.DEADLINE) for name in self._deadlines.passed()]
        events += [ev.SessionClosed(name, IDLE) for name in self._of_sessions.passed()]
        return events
