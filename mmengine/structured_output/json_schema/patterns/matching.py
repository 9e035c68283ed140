"""Whether names and values match patterns, in a time that has a bound.

Python's own matcher goes back and tries again, for some patterns longer than anybody waits, and nothing else
in the process runs meanwhile. So all states that a pattern can be in are followed at once, in a time that
states and characters bound (K. Thompson, Regular Expression Search Algorithm, CACM 1968).
"""

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError, meant
from mmengine.structured_output.regex.read import Unread, read_regex
from mmengine.structured_output.regex.states import States

MAX_STEPS = 2_000_000  # of one schema: states that are looked at
MAX_CROWD = (
    150  # states that a pattern may be in at once: the grammar engine's answer ends beyond some hundreds
)
CROWD_CHARS = 48  # characters after which that is known
MAX_CROWD_CHARS = 8  # different ones that are tried


class Budget:
    """Of one schema, for all its patterns and names together."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps
        self._machines: dict[str, States] = {}  # by pattern

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise PatternError("it takes too long to compare it with names and values; use fewer of both")

    def matches(self, regex: str, text: str) -> bool:
        """Whether `regex`, as pattern.py writes it and without \\p, matches all of `text`. Raises
        PatternError where the schema asks for too much of this."""
        machine = self.machine(regex)
        now = machine.first()
        for char in text:
            now = machine.behind(now, char)
        return machine.ends(now)

    def machine(self, regex: str) -> States:
        if "\\p" in regex or "\\P" in regex:
            raise PatternError("with \\p it cannot be compared with names and other patterns")
        if regex not in self._machines:
            try:
                self._machines[regex] = States(read_regex(regex, meaning=meant), self.spend)
            except Unread as error:
                raise PatternError(str(error)) from None
        return self._machines[regex]


def check_crowd(regex: str, points: list[int]) -> None:
    """PatternError where a text puts the pattern in too many states at once, as counted repetitions of one
    another do whose ends cannot be told. `points`: a character of each set of the pattern."""
    machine = Budget().machine(regex)
    chars = [chr(point) for point in dict.fromkeys(points)][:MAX_CROWD_CHARS]
    now = machine.first()
    for _ in range(CROWD_CHARS):
        now = max((machine.behind(now, char) for char in chars), key=len)
        if len(now) > MAX_CROWD:
            raise PatternError(
                "its counted repetitions can be told apart in too many ways; count one of them, or end each "
                "with a character that it does not hold"
            )
