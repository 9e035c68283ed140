"""Findings: decisions in a log that break a rule of the state.

A log with valid frames, checksums and types may still contain an impossible decision. Such a decision reveals
a bug in the build that wrote the log. Tools show the finding, and continue if the decision can be applied to
the state.
"""

from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

MAX_LISTED = 32  # Maximum number of findings that are stored. Further findings are only counted.
FOLD = "fold"  # The rule's name if a decision cannot be applied and no other rule explains why.


class BrokenRule(NamedTuple):
    """A rule that a decision breaks, checked on the state before the decision.

    `value`: the number that breaks the rule. `limit`: the rule's limit for this number. `can_fold`: whether
    the decision can be applied to the state nevertheless.
    """

    rule: str
    text: str
    value: int
    limit: int
    can_fold: bool = True


class Finding(NamedTuple):
    """A record whose decision breaks a rule. `is_last`: whether tools stop before this record, because the
    record cannot be applied to the state.
    """

    rule: str
    text: str
    value: int
    limit: int
    sequence: int
    step: int
    event: str
    is_last: bool

    def __str__(self) -> str:
        place = f"record {self.sequence} (step {self.step}, {self.event})"
        return f"{place} breaks the rule {self.rule}: {self.text}"


class Findings:
    """The findings in a log, in order. Each finding is counted once, even if a tool reads the log several
    times.

    `listed` has the first MAX_LISTED findings. `count` is the number of all findings. `last` is the finding
    at which tools stop reading, or None.
    """

    def __init__(self) -> None:
        self.listed: list[Finding] = []
        self.count = 0
        self.last: Finding | None = None
        # The record of the last finding, and the rules that this record breaks.
        self._newest = (-1, frozenset[str]())

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, finding: Finding) -> None:
        sequence, rules = self._newest
        if finding.is_last and self.last is None:
            self.last = finding
        if finding.sequence < sequence or finding.sequence == sequence and finding.rule in rules:
            return
        before = rules if finding.sequence == sequence else frozenset[str]()
        self._newest = finding.sequence, before | {finding.rule}
        self.count += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(finding)


def place_of(error: Exception) -> str:
    """Return the type and the text of an exception, and the file and function that raised it."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    code = frame.f_code
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__} in {Path(code.co_filename).name}, {code.co_name}: {text}"
