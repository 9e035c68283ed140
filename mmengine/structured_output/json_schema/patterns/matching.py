"""Matches names and values against patterns in bounded time, and refuses patterns with too many simultaneous
states.

Python's own matcher backtracks, and some patterns would block the process for too long. This module's matcher
follows all states of a pattern at once. Its time is at most proportional to states times characters (K.
Thompson, Regular Expression Search Algorithm, CACM 1968).
"""

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError, restore_nul
from mmengine.structured_output.regex.automaton import Automaton
from mmengine.structured_output.regex.parser import UnsupportedRegex, parse_regex

MAX_STEPS = 2_000_000  # Maximum number of visited states for a schema.
MAX_ACTIVE_STATES = (
    # Maximum number of simultaneous states of a pattern. With a few hundred states, the grammar engine aborts
    # an answer.
    150
)
PROBE_LENGTH = 48  # Length of the text that is tried when the number of states is checked.
MAX_PROBE_CHARACTERS = 8  # Maximum number of different characters to try.


class BudgetExceeded(PatternError):
    """Raised if matching a schema's patterns takes more steps than the schema's MatchBudget allows."""


class MatchBudget:
    """Limits the number of matching steps for a schema, for all its patterns and names together."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps
        self._machines: dict[str, Automaton] = {}  # Pattern -> compiled automaton.

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise BudgetExceeded(
                "comparing the pattern with names and values takes too long; use fewer of both"
            )

    def matches(self, regex: str, text: str) -> bool:
        r"""Return whether `regex` matches the whole `text`.

        `regex` must be written by pattern.py and contain no \p. Raises PatternError if the budget is
        exceeded.
        """
        machine = self.machine(regex)
        now = machine.first()
        for char in text:
            now = machine.advance(now, char)
        return machine.accepts(now)

    def machine(self, regex: str) -> Automaton:
        if "\\p" in regex or "\\P" in regex:
            raise PatternError("a pattern with \\p cannot be compared with names and other patterns")
        if regex not in self._machines:
            try:
                self._machines[regex] = Automaton(parse_regex(regex, meaning=restore_nul), self.spend)
            except UnsupportedRegex as error:
                raise PatternError(str(error)) from None
        return self._machines[regex]


def check_active_states(regex: str, points: list[int]) -> None:
    """Raise PatternError if some text leads to too many simultaneous states.

    Nested counted repetitions can have too many states if it is ambiguous where a repetition ends. `points`:
    a code point from each character set in the pattern.
    """
    machine = MatchBudget().machine(regex)
    chars = [chr(point) for point in dict.fromkeys(points)][:MAX_PROBE_CHARACTERS]
    now = machine.first()
    for _ in range(PROBE_LENGTH):
        now = max((machine.advance(now, char) for char in chars), key=len)
        if len(now) > MAX_ACTIVE_STATES:
            raise PatternError(
                "its counted repetitions can match in too many ways; count only one of them, or end each "
                "with a character that it does not contain"
            )
