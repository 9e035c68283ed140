"""A prompt's media fetches and their results."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.refusals import refused
from mmengine.processing.workers.attempt import GIVEN_UP, AttemptOver

URL_HEADS = ("http://", "https://")
_POLL_S = 0.1  # Interval in s for checks whether the prompt was cancelled.


class Wanted(NamedTuple):
    """A URL or file to fetch. `host`: the URL's host, because fetches are limited per host; "" for a file."""

    name: str
    fetching: "PromptFetch"
    host: str

    @property
    def is_url(self) -> bool:
        return self.name[:8].lower().startswith(URL_HEADS)


class PromptFetch:
    """A prompt's fetches, created by MediaFetcher.begin. They end when all are complete, after the first
    refusal, or when the prompt is cancelled.
    """

    def __init__(
        self,
        limits: FetchLimits,
        done: Callable[["PromptFetch"], None],
        is_over: Callable[[], bool],
        release: Callable[["PromptFetch"], None],
    ) -> None:
        self._limits, self._done, self._is_over, self._release = limits, done, is_over, release
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._missing = self._taken = 0
        self._given_up = False
        self.found: dict[str, bytes] = {}  # URL or path -> bytes.
        self.error: tuple[str, Exception] | None = None  # The first error: (the item's name, exception).
        # Received and reserved bytes. MediaFetcher makes the reservations.
        self.num_bytes = 0
        self.num_running = 0  # Number of running fetches, counted by MediaFetcher.

    def expect(self, number: int) -> None:
        self._missing = number

    @property
    def is_over(self) -> bool:
        return self._given_up or self.error is not None or self._is_over()

    def count_bytes(self, num_bytes: int) -> None:
        """Count received bytes. Raises FetchRefused if the prompt's media are too large in total."""
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
        """Wait until the fetches have ended. Raises AttemptOver if the prompt was cancelled."""
        while not self._ended.wait(_POLL_S):
            if self._given_up or self._is_over():
                raise AttemptOver(GIVEN_UP)

    def release(self) -> None:
        """Release the results. A running `wait` raises AttemptOver. A second call does nothing."""
        self._given_up = True
        self._release(self)
