"""Builds a pattern for all strings that do not match another pattern, or for all strings that are not in a
list. Also finds out whether two patterns may overlap.
"""

from functools import lru_cache

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.languages import (
    build_languages,
    combine,
    has_overlap,
    write_pattern,
)
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget
from mmengine.structured_output.json_schema.patterns.other_keys import pattern_excluding
from mmengine.structured_output.json_schema.patterns.pattern import Pattern
from mmengine.structured_output.json_schema.work import spend_work

MAX_STEPS = 100_000  # Maximum number of steps in which a complement is built or two patterns are compared.


def exclude_values(values: tuple[str, ...]) -> Pattern:
    """Return a pattern for every string except `values`."""
    return Pattern(pattern_excluding(list(values)), None)


def complement_pattern(regex: str) -> Pattern:
    """Return a pattern for all strings that do not match `regex` as a whole.

    `regex` must be written by pattern.py. Raises PatternError with the reason if no such pattern can be
    built.
    """
    found, steps = _cached_complement(regex)
    spend_work(steps)
    if isinstance(found, PatternError):
        raise found
    return found


@lru_cache(maxsize=256)
def _cached_complement(regex: str) -> tuple[Pattern | PatternError, int]:
    """Return the complement, or the error, and the number of steps.

    A cached result counts as many steps as its first computation took. Errors are cached too, because many
    alternatives may need the same complement.
    """
    budget = MatchBudget(MAX_STEPS)
    try:
        return _build_complement(regex, budget), MAX_STEPS - budget.left
    except PatternError as error:
        return error, MAX_STEPS


def _build_complement(regex: str, budget: MatchBudget) -> Pattern:
    left = combine(build_languages([regex], budget), lambda has: not has[0], budget)
    return Pattern("[^\\x00-\\U0010FFFF]" if left.is_empty() else write_pattern(left), None)


def may_overlap(a: str, b: str) -> bool:
    """Return whether some string may match both patterns.

    False is certain. True may also mean that the comparison took too many steps.
    """
    found, steps = _cached_overlap(a, b)
    spend_work(steps)
    return found


@lru_cache(maxsize=1024)
def _cached_overlap(a: str, b: str) -> tuple[bool, int]:
    """Return whether the patterns may overlap, and the number of steps of the comparison."""
    budget = MatchBudget(MAX_STEPS)
    try:
        return has_overlap(a, b, budget), MAX_STEPS - budget.left
    except PatternError:
        return True, MAX_STEPS
