"""Nobody can end a step that hangs in a device, but somebody can notice."""

import threading
import time
from collections.abc import Callable

HANG_EXIT = 75  # "try again": exit code of a process whose step hung, after it said so in its log


class Watchdog:
    """Calls `on_hang`, once and on its own thread, when a `with` block takes longer than `limit_s`."""

    def __init__(self, limit_s: float, on_hang: Callable[[], None]):
        self._limit_s, self._on_hang = limit_s, on_hang
        self._began = 0.0  # 0: nothing is watched
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmengine-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._began = 0.0

    def _run(self) -> None:
        while not self._closing.wait(min(1.0, self._limit_s / 10)):
            began = self._began
            if began and time.monotonic() - began > self._limit_s:
                self._on_hang()
                return

    def close(self) -> None:
        self._closing.set()
