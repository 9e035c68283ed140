"""How long the disk of a log is full already."""

import time

from mmengine.core.engine import EngineCore
from mmengine.errors import LogError
from mmengine.serve.requests.operator_log import operator_log

STALL_PAUSE_S = 0.05
STALL_LIMIT_S = 60.0  # without a step that moves anything, while the disk is full


class StallWatch:
    """Sees a core after each step."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._since = 0.0  # when the engine moved last while the disk was full; 0: the disk is not full

    def stepped(self, *, moved: bool) -> None:
        """A step gave outputs, or none; without any it pauses, so that room may come."""
        if not self._core.stalled:
            self._since = 0.0
            return
        if not self._since:
            operator_log.warning("engine stalled", reason=self._core.stalled)
        if moved or not self._since:
            self._since = time.monotonic()
        if not moved:
            time.sleep(STALL_PAUSE_S)

    def check(self, limit_s: float | None = None) -> None:
        """Raise LogError when the disk was full and nothing moved for `limit_s` (a minute)."""
        limit_s = STALL_LIMIT_S if limit_s is None else limit_s
        if self._since and time.monotonic() - self._since > limit_s:
            raise LogError(f"given up after {limit_s:g} seconds: {self._core.stalled}")
