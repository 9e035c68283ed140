r"""Rewrites the regular expressions in `pattern` and `patternProperties` to equivalent, anchored patterns.

JSON Schema (ECMA-262), the grammar engine (Rust) and Python give `.`, `\d`, `\w`, `\s` and `$` different
meanings. A rewritten pattern has no ambiguous constructs: character sets become explicit ranges, groups lose
their names, and anchors become explicit. Lookaround and back references are refused, because they are not
regular. Nested repetitions are allowed, because the grammar engine follows all paths in parallel. Counted
repetitions are refused if they need too many states.
"""

from functools import lru_cache
from typing import NamedTuple

from mmengine.structured_output.json_schema.patterns.character_sets import (
    ANY,
    PatternError,
    check_alternatives,
)
from mmengine.structured_output.json_schema.patterns.matching import MatchBudget, check_active_states
from mmengine.structured_output.json_schema.patterns.pattern_parser import (
    Parser,
    Part,
    has_anchor,
    join_branches,
    repeat,
)

MAX_CHARS = 2_000
MAX_FOLDED = 20_000  # Maximum number of copies after a length limit is merged into a repetition.
ANYTHING = Part(f"{ANY}*", 0, None)


class Pattern(NamedTuple):
    """A rewritten pattern that matches whole strings.

    `fewest` and `most` are the minimum and maximum number of characters in a match (None: no maximum).
    """

    # The pattern in the grammar engine's dialect. Without \p, the pattern is also valid in Python.
    regex: str
    prefix: str | None  # The literal prefix, if the pattern only requires a prefix.
    fewest: int = 0
    most: int | None = None
    # (part, minimum count, maximum count) if the whole pattern is a repetition.
    times: tuple[Part, int, int | None] | None = None
    # Limits the total matching steps of the schema's patterns.
    budget: MatchBudget | None = None
    exact: bool = True  # Whether `regex` matches everything that the original pattern matches.

    def matches(self, text: str) -> bool:
        if "\\p" in self.regex or "\\P" in self.regex:
            raise PatternError("a pattern with \\p cannot be compared with names and values")
        return (self.budget or MatchBudget()).matches(self.regex, text)

    def with_length(self, low: int, high: int | None) -> "tuple[Pattern, int, int | None]":
        """Merge a length limit (in characters) into the pattern. Return the pattern and the remaining limits.
        A single repetition can express the limit by its counts. The grammar engine is slow if a string has
        both a pattern and a length limit.
        """
        if self.fewest >= low and (high is None or self.most is not None and self.most <= high):
            return self, 0, None
        if self.times is None or not 0 < self.times[0].fewest == self.times[0].most:
            return self, low, high
        part, least, most = self.times
        least = max(least, -(-low // part.fewest))
        ends = [end for end in (most, None if high is None else high // part.fewest) if end is not None]
        if ends and min(ends) < least or part.copies * max([least, *ends]) > MAX_FOLDED:
            return self, low, high
        return self._replace(regex=repeat(part, least, min(ends) if ends else None).text), 0, None


def anchor_branches(branches: list[list[Part]], left: bool, right: bool) -> list[list[Part]]:
    """Return the alternatives rewritten to match whole strings. Alternatives without `^` allow any text
    before them, and alternatives without `$` allow any text after them.
    """
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
            out += anchor_branches(parts[0].branches, at_start, at_end)
            continue
        if has_anchor([parts]):
            raise PatternError("^ and $ are supported only at the ends of an alternative")
        if not at_start:
            parts = [ANYTHING, *_shorten_tail(parts[::-1])[::-1]]
        if not at_end:
            parts = parts if parts[-1:] == [ANYTHING] else [*_shorten_tail(parts), ANYTHING]
        out.append(parts)
    return out


def _shorten_tail(parts: list[Part]) -> list[Part]:
    """Reduce a repetition at the end to its minimum count, because any text may follow."""
    while parts and parts[-1].times is not None:
        part, low, _ = parts[-1].times
        parts = [*parts[:-1], *([repeat(part, low, low)] if low else [])]
        if low:
            break
    return parts


@lru_cache(maxsize=256)
def parse_pattern(text: str) -> Pattern:
    """Parse and rewrite a pattern. Raises PatternError with the reason if the pattern is not supported."""
    if len(text) > MAX_CHARS:
        raise PatternError(f"the pattern has {len(text):,} characters; the limit is {MAX_CHARS:,}")
    parser = Parser(text)
    branches = parser.branches()
    if parser.at < len(text):
        parser.fail("a ) has no matching (")
    check_alternatives(parser.sets)
    prefix = None
    if len(branches) == 1 and branches[0] and branches[0][0].anchor == "^":
        prefix = join_branches([branches[0][1:]]).literal if not has_anchor([branches[0][1:]]) else None
    alternatives = anchor_branches(branches, False, False)
    whole = join_branches(alternatives)
    regex = whole.text if len(alternatives) == 1 else f"(?:{whole.text})"
    if parser.crowded and "\\p" not in regex.lower():
        check_active_states(regex, [ranges[0][0] for ranges in parser.sets if ranges])
    return Pattern(regex, prefix, whole.fewest, whole.most, _find_repetition(alternatives))


def _find_repetition(alternatives: list[list[Part]]) -> tuple[Part, int, int | None] | None:
    """Return (part, minimum count, maximum count) if the pattern repeats a single part, otherwise None."""
    if len(alternatives) > 1 or len(alternatives[0]) != 1 or alternatives[0][0].times is None:
        return None
    part, low, high = alternatives[0][0].times
    return part._replace(branches=None, times=None), low, high
