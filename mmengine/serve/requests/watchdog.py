"""Nobody can end a step that hangs in a device, but somebody can notice."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from mmengine.models.step_progress import steps_told

HANG_EXIT = 75  # "try again": exit code of a process whose step hung, after it said so in its log


class Watchdog:
    """Calls `on_hang`, once and on its own thread, when a `with` block gets no further for `limit_s`: neither
    ends nor tells of anything done (models/step_progress.py). A long step that gets on may be as long as it
    is."""

    def __init__(self, limit_s: float, on_hang: Callable[[], None]):
        self._limit_s, self._on_hang = limit_s, on_hang
        self._moved = 0.0  # when what is watched began, or told of something done; 0: nothing is watched
        self._telling: AbstractContextManager[None] = nullcontext()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mmengine-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._telling = steps_told(self._tell)
        self._telling.__enter__()
        self._moved = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._moved = 0.0
        self._telling.__exit__(None, None, None)

    def _tell(self) -> None:
        self._moved = time.monotonic()

    def _run(self) -> None:
        while not self._closing.wait(min(1.0, self._limit_s / 10)):
            moved = self._moved
            if moved and time.monotonic() - moved > self._limit_s:
                self._on_hang()
                return

    def close(self) -> None:
        self._closing.set()
