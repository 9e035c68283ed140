"""Syncs the log to the disk, and packs and deletes old log segments, on a background thread."""

import threading
import time
from collections.abc import Callable

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.errors import LogError

SYNC_INTERVAL_S = 0.01
# Seconds between calls of `tidy` while no steps run. Segments may reach their maximum age meanwhile.
IDLE_S = 60.0


class LogSyncer:
    """Calls `sync` and `tidy` in the background after steps, at most every 10 ms.

    `sync` protects the log against power cuts; None disables syncs. A killed process loses no events, with or
    without syncs. `tidy` packs full segments and deletes old segments. While no steps run, `tidy` runs once a
    minute.
    """

    def __init__(self, sync: Callable[[], None] | None, tidy: Callable[[], None]):
        self._sync, self._tidy = sync, tidy
        self._dirty = threading.Event()
        self._closing = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="mmengine-log-sync", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, core: EngineCore, config: EngineConfig) -> "LogSyncer":
        """Return a LogSyncer for the core's log, which calls `sync` only if `log_sync` is "background"."""
        return cls(core.sync if config.log_sync == "background" else None, core.tidy)

    def notify(self) -> None:
        """Record that events were committed to the log. Raises LogError if an earlier sync failed."""
        if self._error is not None:
            raise LogError(f"the log could not be synced to the disk: {self._error.strerror}")
        self._dirty.set()

    def _run(self) -> None:
        while not self._closing:
            is_dirty = self._dirty.wait(IDLE_S)
            if is_dirty:
                self._dirty.clear()
            try:
                if is_dirty and self._sync is not None:
                    self._sync()
            except OSError as error:
                self._error = error
                return
            self._tidy()
            time.sleep(SYNC_INTERVAL_S)

    def close(self) -> None:
        self._closing = True
        self._dirty.set()
        self._thread.join()
