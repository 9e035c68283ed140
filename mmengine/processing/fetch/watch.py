"""The one end of a fetch: its deadline, or nobody wants it any more. All that it waits for, it waits for
here."""

import select
import socket
import threading
import time
from collections.abc import Callable

from mmengine.processing.fetch.refusals import refused
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver

_POLL_S = 0.1  # how soon a fetch that waits hears that it was given up


class Watch:
    """`limit_s`: from now on. `is_over`: whether nobody wants it."""

    def __init__(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        self._ends_at, self._is_over = time.monotonic() + limit_s, is_over

    def check(self) -> float:
        """Seconds that are left. Raises FetchRefused, AttemptOver."""
        if self._is_over():
            raise AttemptOver(GIVEN_UP)
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise refused("timeout")
        return left

    def part(self, number: int) -> "Watch":
        """A watch over one of `number` equal parts of what is left."""
        return Watch(self.check() / number, self._is_over)

    def wait_for(self, one: socket.socket, what: int) -> None:
        """`what`: select.POLLIN or POLLOUT."""
        poll = select.poll()
        poll.register(one, what)
        while not poll.poll(1000 * min(self.check(), _POLL_S)):
            pass

    def wait_until(self, event: threading.Event) -> None:
        while not event.wait(min(self.check(), _POLL_S)):
            pass
