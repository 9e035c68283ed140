"""Findings: decisions in a log that break a rule of the state.

A log whose frames, checksums and types are sound but whose decision is impossible is evidence of a bug in the
build that wrote the log. Tools show the finding and continue, as far as the state can take the decision.
"""

from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

MAX_LISTED = 32  # Findings that are kept; further findings are only counted.
FOLD = "fold"  # The rule's name if the state cannot take a decision and no other rule says why.


class BrokenRule(NamedTuple):
    """A rule that a decision breaks, on the state before the decision.

    `value` and `limit`: the figures in `text`. `can_fold`: whether the state can take the decision.
    """

    rule: str
    text: str
    value: int
    limit: int
    can_fold: bool = True


class Finding(NamedTuple):
    """A record whose decision breaks a rule. `is_last`: the record cannot be applied to the state, so tools
    read the log up to this record.
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
    """The findings in a log, in order. A tool that reads the log several times finds each of them once.

    `listed` has at most MAX_LISTED findings; `count` counts all. `last` is the finding at which the tools
    stop reading, or None.
    """

    def __init__(self) -> None:
        self.listed: list[Finding] = []
        self.count = 0
        self.last: Finding | None = None
        self._newest = (-1, frozenset[str]())  # The last finding's record, and the rules that it breaks.

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
    """Return an exception's type and text, and the file and function that raised it."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    code = frame.f_code
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__} in {Path(code.co_filename).name}, {code.co_name}: {text}"
