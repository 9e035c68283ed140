"""Whether a server's process that broke down is started again, when, and which step has the blame."""

import signal
from dataclasses import dataclass
from typing import NamedTuple

from mmengine.cli.supervisor import MAX_RESTARTS, Ended
from mmengine.errors import MMEngineError

MAX_FAILED_LOADS = 5  # processes of a server in a row that end before their model is loaded
BLAMED_KILLS = 3  # processes in a row that somebody kills without a token of any: then the step has the blame
STEADY_S = 60.0  # who has served so long began well
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0  # before the second restart in a row, doubled for each further one
STAYS = "what was accepted stays in the log, and the same command goes on from there"


class Life(NamedTuple):
    """What is known of a process that broke down. `reasons`: what it said last against itself. `by_memory`:
    whether the kernel killed it for memory."""

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
        """By somebody, as far as is known: it may have done nothing to deserve it."""
        return self.ended.code == -signal.SIGKILL and not self.by_memory

    @property
    def got_on(self) -> bool:
        return self.num_tokens > 0 or self.served_s >= STEADY_S


@dataclass(slots=True)
class Restarts:
    """`cause`: what the next process is to hold against the step that was on its way."""

    cause: str = ""
    _in_a_row: int = 0
    _failed_loads: int = 0

    def pause_s(self, life: Life) -> float:
        """How long to wait before the next process. Raises MMEngineError: it is given up."""
        self._in_a_row = 1 if life.got_on else self._in_a_row + 1
        if life.is_built:
            self._failed_loads = 0
        elif not life.was_killed:
            self._failed_loads += 1
        if self._failed_loads > MAX_FAILED_LOADS:
            raise MMEngineError(
                f"given up: {self._failed_loads} processes in a row ended before the model was loaded, the "
                f"last one so: {life.what}; {STAYS}"
            )
        if self._in_a_row > MAX_RESTARTS:
            raise MMEngineError(
                f"given up after {self._in_a_row - 1} restarts without a new token: {life.what}; {STAYS}"
            )
        if self._blames(life):
            self.cause = life.what
        elif life.got_on:  # else a process before may have a blame that no process took up yet
            self.cause = ""
        if self._in_a_row == 1:
            return 0.0
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._in_a_row - 2))

    def _blames(self, life: Life) -> bool:
        if not life.is_built or life.ended.in_media:
            return False
        return not life.was_killed or self._in_a_row >= BLAMED_KILLS
