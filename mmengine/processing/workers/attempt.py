"""The preparation of one request, which has an end in time and can be ended from outside."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mmengine.errors import RequestFailed

GIVEN_UP = "the request was given up before it began"
_current: ContextVar["Attempt | None"] = ContextVar("attempt", default=None)


class AttemptOver(RequestFailed):
    """Nobody waits for what is being prepared."""


class Attempt:
    """`ends_at`: of time.monotonic(), None: never. `waits`: for a decoder, where as many as may work are
    busy. Thread-safe."""

    def __init__(self, ends_at: float | None, *, waits: bool = True) -> None:
        self.ends_at, self.waits = ends_at, waits
        self._given_up = False
        self._lock = threading.Lock()
        self._kill: Callable[[], None] | None = None  # ends what runs for it now

    @property
    def is_over(self) -> bool:
        return self._given_up or (self.ends_at is not None and time.monotonic() >= self.ends_at)

    def check(self) -> None:
        if self.is_over:
            raise AttemptOver(GIVEN_UP)

    def give_up(self) -> None:
        """End it, with whatever runs for it."""
        with self._lock:
            self._given_up = True
            if self._kill is not None:
                self._kill()

    @contextmanager
    def running(self, kill: Callable[[], None]) -> Iterator[None]:
        """In here `give_up` calls `kill`. Raises AttemptOver at once where it was given up before."""
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
        """What is decoded in here is decoded for this attempt."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_attempt() -> Attempt:
    """Of this thread; one without an end where nobody said."""
    return _current.get() or Attempt(None)
