"""The time limit for minimizing a log, from reading the log to writing the result."""

from math import inf
from time import monotonic

from mmengine.errors import LogError


class OutOfTime(LogError):
    """Raised when the deadline passes during an operation."""


class Deadline:
    """A deadline, `seconds` after its creation. `doing`: the current operation, which the error message
    names.
    """

    def __init__(self, seconds: float = inf):
        self.seconds, self._begin = seconds, monotonic()
        self.doing = "reading the log"

    def passed(self) -> float:
        """Return the number of seconds since the deadline's creation."""
        return monotonic() - self._begin

    def left(self) -> float:
        return self.seconds - self.passed()

    def check(self) -> None:
        """Raise OutOfTime if no time is left."""
        if self.left() <= 0:
            raise self.over()

    def over(self) -> OutOfTime:
        return OutOfTime(f"the limit of {self.seconds:g} seconds passed while {self.doing}; raise --seconds")
