"""A deadline for all waits in a fetch. Cancelling the request also ends the waits."""

import select
import socket
import threading
import time
from collections.abc import Callable

from mmengine.processing.fetch.refusals import refused
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver

_POLL_S = 0.1  # Seconds between two checks for cancellation.


class Deadline:
    """A deadline. `limit_s`: seconds from now. `is_over`: returns whether the request was cancelled."""

    def __init__(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        self._ends_at, self._is_over = time.monotonic() + limit_s, is_over

    def check(self) -> float:
        """Return the remaining seconds. Raises FetchRefused after the deadline, and AttemptOver after a
        cancellation.
        """
        if self._is_over():
            raise AttemptOver(GIVEN_UP)
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise refused("timeout")
        return left

    def part(self, number: int) -> "Deadline":
        """Divide the remaining time into `number` equal parts, and return the first part's deadline."""
        return Deadline(self.check() / number, self._is_over)

    def wait_for(self, one: socket.socket, what: int) -> None:
        """Wait until a socket is ready. `what`: select.POLLIN or POLLOUT."""
        poll = select.poll()
        poll.register(one, what)
        while not poll.poll(1000 * min(self.check(), _POLL_S)):
            pass

    def wait_until(self, event: threading.Event) -> None:
        while not event.wait(min(self.check(), _POLL_S)):
            pass
