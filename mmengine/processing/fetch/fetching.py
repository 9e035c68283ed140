"""What one prompt wants from the door, and what came of it."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.refusals import refused
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver

URL_HEADS = ("http://", "https://")
_POLL_S = 0.1  # how soon one that waits hears that nobody wants it


class Wanted(NamedTuple):
    """`host`: whose place it takes, "" for a file."""

    name: str
    fetching: "Fetching"
    host: str

    @property
    def is_url(self) -> bool:
        return self.name[:8].lower().startswith(URL_HEADS)


class Fetching:
    """Made by MediaDoor.begin. It is over when everything is there, one is refused, or nobody wants it."""

    def __init__(
        self,
        limits: FetchLimits,
        done: Callable[["Fetching"], None],
        is_over: Callable[[], bool],
        release: Callable[["Fetching"], None],
    ) -> None:
        self._limits, self._done, self._is_over, self._release = limits, done, is_over, release
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._missing = self._taken = 0
        self._given_up = False
        self.found: dict[str, bytes] = {}  # by name
        self.error: tuple[str, Exception] | None = None  # the first one, and the name that it is of
        self.num_bytes = 0  # held at the door; the next two are the door's
        self.num_running = 0

    def expect(self, number: int) -> None:
        self._missing = number

    @property
    def is_over(self) -> bool:
        return self._given_up or self.error is not None or self._is_over()

    def took(self, num_bytes: int) -> None:
        """Raises FetchRefused where a prompt has too much together."""
        with self._lock:
            self._taken += num_bytes
            if self._taken > self._limits.max_bytes_a_prompt:
                raise refused("total", f"more than {self._limits.max_bytes_a_prompt} bytes")

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            self.num_bytes += len(data) - self._limits.max_bytes
            self.found[name] = data
            self._missing -= 1
            is_last = not self._missing and self.error is None
        if is_last:
            self._end()

    def fail(self, name: str, error: Exception) -> None:
        with self._lock:
            self.num_bytes -= self._limits.max_bytes
            is_first = self.error is None
            if is_first:
                self.error = name, error
                self.found.clear()
        if is_first:
            self._end()

    def _end(self) -> None:
        self._ended.set()
        self._done(self)

    def wait(self) -> None:
        """Until it is over. Raises AttemptOver where nobody wants it."""
        while not self._ended.wait(_POLL_S):
            if self._given_up or self._is_over():
                raise AttemptOver(GIVEN_UP)

    def release(self) -> None:
        """Nobody needs what it found any more, or waits for it. Twice is no error."""
        self._given_up = True
        self._release(self)
