"""A thread pool whose queued calls can be cancelled before a thread starts them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class CancellableWorkers(Generic[Key]):
    """Runs queued calls in order on up to `num_threads` threads, which are created when they are needed.

    Calls must not raise. Thread-safe.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Key, Callable[[], None]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False

    def put(self, key: Key, call: Callable[[], None]) -> None:
        with self._changed:
            self._waiting[key] = call
            if self._num_idle < len(self._waiting) and len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()

    def drop(self, key: Key) -> bool:
        """Remove the waiting call with this key. Returns False if no call with this key waits."""
        with self._changed:
            return self._waiting.pop(key, None) is not None

    @property
    def first_waiting(self) -> Key | None:
        """The key of the call that starts next; None if no call waits."""
        with self._changed:
            return next(iter(self._waiting), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._waiting and not self._closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._waiting:
                    return
                _, call = self._waiting.popitem(last=False)
            call()
            del call  # frees the call's objects while this thread waits

    def close(self, until: float) -> None:
        """Wait until all queued calls have run and the threads have ended, at most until `until`.

        `until` is a time on time.monotonic()'s clock. A thread that runs longer is abandoned and does not
        keep the process alive.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
