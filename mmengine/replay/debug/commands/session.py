"""A debugger session, which runs the command lines that a person types."""

from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.replay.debug.commands import (  # noqa: F401 - registers the commands
    comparing,
    movement,
    questions,
    stopping,
    views,
)
from mmengine.replay.debug.commands.registry import MAX_LINE, find
from mmengine.replay.debug.commands.session_base import SessionBase
from mmengine.replay.debug.debugger import Debugger
from mmengine.replay.debug.views import Block


class Session(SessionBase):
    """A debugger session for a log, with all commands. `other`: the debugger on a second log to compare."""

    def __init__(self, debugger: Debugger, other: Debugger | None = None):
        super().__init__(debugger, other)
        self._last = ""

    def run(self, line: str) -> list[Block]:
        """Run a command line, and return its output. An empty line repeats the last command. Raises
        MMEngineError if the command fails. A failed command leaves the position unchanged, or at the record
        where the error occurred.
        """
        if len(line) > MAX_LINE:
            raise InvalidRequest(f"the line has {len(line)} characters; the limit is {MAX_LINE}")
        line = line.strip() or self._last
        if not line or line.startswith("#"):
            return []
        word, _, rest = line.partition(" ")
        found = find(word)
        self._last = line
        return found.run(self, rest.strip())

    def try_run(self, line: str) -> tuple[list[Block], str]:
        """Run a command line. Return its output, and the error message or ""."""
        try:
            return self.run(line), ""
        except MMEngineError as error:
            return [], str(error)
