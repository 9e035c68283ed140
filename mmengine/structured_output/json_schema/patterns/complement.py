"""Patterns for the strings that another pattern, or a list of values, does not match."""

from functools import lru_cache

from mmengine.structured_output.json_schema.patterns.character_sets import PatternError
from mmengine.structured_output.json_schema.patterns.languages import combined, languages, overlap, written
from mmengine.structured_output.json_schema.patterns.matching import Budget
from mmengine.structured_output.json_schema.patterns.other_keys import all_but
from mmengine.structured_output.json_schema.patterns.pattern import Pattern

MAX_STEPS = 100_000  # of making one, or of comparing two patterns


def without_values(values: tuple[str, ...]) -> Pattern:
    """Every string but these."""
    return Pattern(all_but(list(values)), None)


def opposite(regex: str) -> Pattern:
    """Every string that `regex`, as pattern.py writes it, does not match as a whole. PatternError says why
    there is none."""
    found = _opposite(regex)
    if isinstance(found, PatternError):
        raise found
    return found


@lru_cache(maxsize=256)
def _opposite(regex: str) -> Pattern | PatternError:
    """Kept where it fails too, as many alternatives may ask for it and failing is what takes longest."""
    try:
        return _worked_out(regex)
    except PatternError as error:
        return error


def _worked_out(regex: str) -> Pattern:
    left = combined(languages([regex], Budget(MAX_STEPS)), lambda has: not has[0])
    return Pattern("[^\\x00-\\U0010FFFF]" if left.is_empty() else written(left), None)


@lru_cache(maxsize=1024)
def meet(a: str, b: str) -> bool:
    """Whether some string may match both patterns; False is proved."""
    try:
        return overlap(a, b, Budget(MAX_STEPS))
    except PatternError:
        return True
