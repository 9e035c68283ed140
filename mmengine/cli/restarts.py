"""Decides whether and when to restart a server's failed process, and whether to blame the process's last
step.
"""

import signal
from dataclasses import dataclass
from typing import NamedTuple

from mmengine.cli.supervisor import MAX_RESTARTS, Ended
from mmengine.errors import MMEngineError

MAX_FAILED_LOADS = 5  # Maximum number of consecutive processes that end before their model is loaded.
BLAMED_KILLS = 3  # After this many consecutive kills without a new token, the process's last step is blamed.
STEADY_S = 60.0  # A process that serves at least this many seconds counts as progress.
# Pause before the second consecutive restart, and maximum pause, in seconds. Each restart doubles the pause.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
STAYS = "accepted requests stay in the log, and the same command continues with them"


class Life(NamedTuple):
    """A process that failed.

    `is_built`: whether the process had loaded its model. `num_tokens`: number of delivered tokens.
    `served_s`: seconds during which the process served. `reasons`: the problems in its last heartbeat.
    `by_memory`: whether an out-of-memory kill ended it.
    """

    ended: Ended
    is_built: bool
    num_tokens: int
    served_s: float
    reasons: tuple[str, ...] = ()
    by_memory: bool = False

    @property
    def what(self) -> str:
        if self.ended.code == -signal.SIGKILL:
            return "the process was killed (SIGKILL)" + (", for memory" if self.by_memory else "")
        said = "; ".join(self.reasons) if self.ended.code > 0 else ""
        return f"{self.ended.what} ({said})" if said else self.ended.what

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the process for an unknown reason. Then the last step may not be at fault."""
        return self.ended.code == -signal.SIGKILL and not self.by_memory

    @property
    def got_on(self) -> bool:
        return self.num_tokens > 0 or self.served_s >= STEADY_S


@dataclass(slots=True)
class Restarts:
    """The restart policy. `cause`: text that describes the failure for which a step is blamed, or "".

    With a `cause`, the next process isolates the requests of the blamed step.
    """

    cause: str = ""
    _in_a_row: int = 0
    _failed_loads: int = 0

    def pause_s(self, life: Life) -> float:
        """Return the pause in seconds before the next process. Raises MMEngineError after too many
        restarts.
        """
        self._in_a_row = 1 if life.got_on else self._in_a_row + 1
        if life.is_built:
            self._failed_loads = 0
        elif not life.was_killed:
            self._failed_loads += 1
        if self._failed_loads > MAX_FAILED_LOADS:
            raise MMEngineError(
                f"given up: {self._failed_loads} processes in a row ended before the model was loaded; the "
                f"last error: {life.what}; {STAYS}"
            )
        if self._in_a_row > MAX_RESTARTS:
            raise MMEngineError(
                f"given up after {self._in_a_row - 1} restarts without a new token: {life.what}; {STAYS}"
            )
        if self._blames(life):
            self.cause = life.what
        elif life.got_on:
            self.cause = ""
        # Without progress, `cause` stays: the process may have failed before it isolated the blamed requests.
        if self._in_a_row == 1:
            return 0.0
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._in_a_row - 2))

    def _blames(self, life: Life) -> bool:
        if not life.is_built or life.ended.in_media:
            return False
        return not life.was_killed or self._in_a_row >= BLAMED_KILLS
