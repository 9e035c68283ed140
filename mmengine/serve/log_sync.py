"""Forcing the log to the disk beside the engine, not in its way."""

import threading
import time
from collections.abc import Callable

from mmengine.errors import LogError

SYNC_INTERVAL_S = 0.01


class LogSyncer:
    """Forces the log to the disk in the background, at most every 10 ms and only after a step.

    A killed process loses nothing without it; this is about power cuts.
    """

    def __init__(self, sync: Callable[[], None]):
        self._sync = sync
        self._dirty = threading.Event()
        self._closing = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="mmengine-log-sync", daemon=True)
        self._thread.start()

    def notify(self) -> None:
        """Something was committed. Raises LogError when an earlier sync failed."""
        if self._error is not None:
            raise LogError(f"the log could not be forced to the disk: {self._error.strerror}")
        self._dirty.set()

    def _run(self) -> None:
        while not self._closing:
            self._dirty.wait()
            self._dirty.clear()
            try:
                self._sync()
            except OSError as error:
                self._error = error
                return
            time.sleep(SYNC_INTERVAL_S)

    def close(self) -> None:
        self._closing = True
        self._dirty.set()
        self._thread.join()
