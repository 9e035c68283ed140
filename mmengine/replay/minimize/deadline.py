"""How long minimizing may take, in all: reading the log, each replay, and writing down what is left."""

from math import inf
from time import monotonic

from mmengine.errors import LogError


class OutOfTime(LogError):
    """The deadline passed in the middle of something."""


class Deadline:
    """`seconds` from now on. `doing`: what is done meanwhile, for the error's text."""

    def __init__(self, seconds: float = inf):
        self.seconds, self._begin = seconds, monotonic()
        self.doing = "reading the log"

    def passed(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._begin

    def left(self) -> float:
        return self.seconds - self.passed()

    def check(self) -> None:
        """Raises OutOfTime when no time is left."""
        if self.left() <= 0:
            raise self.over()

    def over(self) -> OutOfTime:
        return OutOfTime(f"{self.seconds:g} seconds were over while {self.doing}; give --seconds more")
