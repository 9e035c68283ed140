r"""Rewrite the regular expressions in `pattern` and `patternProperties` from ECMA-262 into an equal, anchored
dialect.

The dialects of JSON Schema (ECMA-262), the grammar engine (Rust) and Python differ in the constructs that
they support and in their meaning for `.`, `\d`, `\w`, `\s` and `$`. The parser therefore writes each
pattern again without anything ambiguous: character sets as explicit ranges, groups without names, explicit
anchors. It refuses constructs that are not regular (lookaround, back references). Nested repetitions are
allowed, since the grammar engine follows all paths at once. Counted repetitions are refused if their counts
would need too many states in mid-answer.
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
MAX_FOLDED = 20_000  # Maximum number of copies in a pattern after it absorbs a length limit.
ANYTHING = Part(f"{ANY}*", 0, None)


class Pattern(NamedTuple):
    """A regular expression that is written again for whole strings.

    `fewest` and `most` count a match's characters (None: any number).
    """

    regex: str  # Matches a whole string in the grammar engine's dialect and, without \\p, in Python's.
    prefix: str | None  # The text, if the pattern means "starts with this text" and nothing more.
    fewest: int = 0
    most: int | None = None
    # The repeated part and its counts, if the pattern is a single repetition.
    times: tuple[Part, int, int | None] | None = None
    budget: MatchBudget | None = None  # Limits the comparisons of all patterns of a schema.
    exact: bool = True  # Whether the pattern matches everything that it stands for, and not slightly less.

    def matches(self, text: str) -> bool:
        if "\\p" in self.regex or "\\P" in self.regex:
            raise PatternError("a pattern with \\p cannot be compared with names and values")
        return (self.budget or MatchBudget()).matches(self.regex, text)

    def with_length(self, low: int, high: int | None) -> "tuple[Pattern, int, int | None]":
        """Absorb a length limit into the pattern, and return the pattern with the limits that remain.

        Two counts on the same string are slow to compile and to follow, so the pattern's own repetition
        absorbs the other count if it can.
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
    """Return whole-string alternatives: a side without an anchor may have any text next to it."""
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
    """Reduce a repetition at the end to its minimum count, since any text may follow it."""
    while parts and parts[-1].times is not None:
        part, low, _ = parts[-1].times
        parts = [*parts[:-1], *([repeat(part, low, low)] if low else [])]
        if low:
            break
    return parts


@lru_cache(maxsize=256)
def parse_pattern(text: str) -> Pattern:
    """Rewrite a pattern so that it matches a whole string. Raises PatternError with the reason."""
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
    """Return the part that the whole pattern repeats, and its counts; None if the pattern is more than one
    repetition.
    """
    if len(alternatives) > 1 or len(alternatives[0]) != 1 or alternatives[0][0].times is None:
        return None
    part, low, high = alternatives[0][0].times
    return part._replace(branches=None, times=None), low, high
