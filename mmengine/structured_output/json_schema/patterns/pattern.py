"""Regular expressions of `pattern` and `patternProperties`: ECMA-262 in, an equal anchored one out.

The dialects of JSON Schema (ECMA-262), of the grammar engine (Rust) and of Python differ in what `.`,
`\\d`, `\\w`, `\\s` and `$` mean and in what they know. So a pattern is parsed here and written again with
nothing in it that means two things: sets of characters as explicit ranges, groups without names, and
anchors made explicit. What is no regular language (lookaround, back references) is refused. Repetitions of
repetitions are not: the grammar engine follows all ways at once. What it has to tell apart by counting is
refused where that would be too much in the middle of an answer.
"""

from functools import lru_cache
from typing import NamedTuple

from mmengine.structured_output.json_schema.patterns.character_sets import (
    ANY,
    PatternError,
    check_alternatives,
)
from mmengine.structured_output.json_schema.patterns.matching import Budget, check_crowd
from mmengine.structured_output.json_schema.patterns.pattern_parser import (
    Parser,
    Part,
    has_anchor,
    joined,
    repeated,
)

MAX_CHARS = 2_000
MAX_FOLDED = 20_000  # of the copies that a pattern makes where it takes up a length
ANYTHING = Part(f"{ANY}*", 0, None)


class Pattern(NamedTuple):
    """`fewest`, `most`: characters of what it matches (None: any number)."""

    regex: str  # matches a whole string, in the grammar engine's and (without \\p) in Python's dialect
    prefix: str | None  # set when the pattern is "starts with this text" and nothing more
    fewest: int = 0
    most: int | None = None
    times: tuple[Part, int, int | None] | None = None  # what it is a repetition of, and nothing more
    budget: Budget | None = None  # what comparing may take, of all patterns of a schema
    exact: bool = True  # whether it matches all that it stands for, and not a little less

    def matches(self, text: str) -> bool:
        if "\\p" in self.regex or "\\P" in self.regex:
            raise PatternError("with \\p it cannot be compared with names and values")
        return (self.budget or Budget()).matches(self.regex, text)

    def of_length(self, low: int, high: int | None) -> "tuple[Pattern, int, int | None]":
        """The pattern, and what is left to be said of the characters: two counts of one string are slow to
        compile and to follow, so the pattern's own takes up the other where it can."""
        if self.fewest >= low and (high is None or self.most is not None and self.most <= high):
            return self, 0, None
        if self.times is None or not 0 < self.times[0].fewest == self.times[0].most:
            return self, low, high
        part, least, most = self.times
        least = max(least, -(-low // part.fewest))
        ends = [end for end in (most, None if high is None else high // part.fewest) if end is not None]
        if ends and min(ends) < least or part.copies * max([least, *ends]) > MAX_FOLDED:
            return self, low, high
        return self._replace(regex=repeated(part, least, min(ends) if ends else None).text), 0, None


def anchored(branches: list[list[Part]], left: bool, right: bool) -> list[list[Part]]:
    """Whole-string alternatives: what is not anchored may have anything before or behind it."""
    out = []
    for parts in branches:
        parts = list(parts)
        at_start, at_end = left, right
        while parts and parts[0].anchor == "^":
            at_start = True
            parts.pop(0)
        while parts and parts[-1].anchor == "$":
            at_end = True
            parts.pop()
        if len(parts) == 1 and parts[0].branches and has_anchor(parts[0].branches):
            out += anchored(parts[0].branches, at_start, at_end)
            continue
        if has_anchor([parts]):
            raise PatternError("^ and $ are known only at the ends of an alternative")
        if not at_start:
            parts = [ANYTHING, *_least(parts[::-1])[::-1]]
        if not at_end:
            parts = parts if parts[-1:] == [ANYTHING] else [*_least(parts), ANYTHING]
        out.append(parts)
    return out


def _least(parts: list[Part]) -> list[Part]:
    """What is repeated at the end, where anything may follow, need be repeated no more often than it must."""
    while parts and parts[-1].times is not None:
        part, low, _ = parts[-1].times
        parts = [*parts[:-1], *([repeated(part, low, low)] if low else [])]
        if low:
            break
    return parts


@lru_cache(maxsize=256)
def parse_pattern(text: str) -> Pattern:
    """The pattern written again so that it matches a whole string; PatternError says what is wrong."""
    if len(text) > MAX_CHARS:
        raise PatternError(f"a pattern has at most {MAX_CHARS:,} characters, this one {len(text):,}")
    parser = Parser(text)
    branches = parser.branches()
    if parser.at < len(text):
        parser.fail("a ) closes no group")
    check_alternatives(parser.sets)
    prefix = None
    if len(branches) == 1 and branches[0] and branches[0][0].anchor == "^":
        prefix = joined([branches[0][1:]]).literal if not has_anchor([branches[0][1:]]) else None
    alternatives = anchored(branches, False, False)
    whole = joined(alternatives)
    regex = whole.text if len(alternatives) == 1 else f"(?:{whole.text})"
    if parser.crowded and "\\p" not in regex.lower():
        check_crowd(regex, [ranges[0][0] for ranges in parser.sets if ranges])
    return Pattern(regex, prefix, whole.fewest, whole.most, _times(alternatives))


def _times(alternatives: list[list[Part]]) -> tuple[Part, int, int | None] | None:
    """What all of a pattern repeats, if it does nothing else."""
    if len(alternatives) > 1 or len(alternatives[0]) != 1 or alternatives[0][0].times is None:
        return None
    part, low, high = alternatives[0][0].times
    return part._replace(branches=None, times=None), low, high
