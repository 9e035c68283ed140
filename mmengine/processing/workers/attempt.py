"""The deadline and the cancellation of one attempt to prepare a request."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mmengine.errors import RequestFailed

GIVEN_UP = "the request was given up before it began"
_current: ContextVar["Attempt | None"] = ContextVar("attempt", default=None)


class AttemptOver(RequestFailed):
    """The request was given up while it was being prepared."""


class Attempt:
    """A preparation that can be cancelled. Thread-safe.

    `ends_at`: deadline by time.monotonic(); None for no deadline. `waits`: whether to wait while all decoders
    are busy. If False, an additional decoder is started.
    """

    def __init__(self, ends_at: float | None, *, waits: bool = True) -> None:
        self.ends_at, self.waits = ends_at, waits
        self._given_up = False
        self._lock = threading.Lock()
        self._kill: Callable[[], None] | None = None  # Ends the current work.

    @property
    def is_over(self) -> bool:
        return self._given_up or (self.ends_at is not None and time.monotonic() >= self.ends_at)

    def check(self) -> None:
        if self.is_over:
            raise AttemptOver(GIVEN_UP)

    def give_up(self) -> None:
        """Cancel the attempt and its current work."""
        with self._lock:
            self._given_up = True
            if self._kill is not None:
                self._kill()

    @contextmanager
    def running(self, kill: Callable[[], None]) -> Iterator[None]:
        """While the context lasts, `give_up` calls `kill`. Raises AttemptOver if the attempt is over."""
        with self._lock:
            self.check()
            self._kill = kill
        try:
            yield
        finally:
            with self._lock:
                self._kill = None

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Make this attempt the thread's `current_attempt` while the context lasts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_attempt() -> Attempt:
    """Return the attempt of this thread, or a new attempt without a deadline."""
    return _current.get() or Attempt(None)
