"""Regular expressions of `pattern` and `patternProperties`: ECMA-262 in, an equal anchored one out.

The dialects of JSON Schema (ECMA-262), of the grammar engine (Rust) and of Python differ in what `.`,
`\\d`, `\\w`, `\\s` and `$` mean and in what they know. So a pattern is parsed here and written again with
nothing in it that means two things: sets of characters as explicit ranges, groups without names, and
anchors made explicit. What is no regular language (lookaround, back references) is refused, as is what
makes a backtracking matcher explode: the reader of the JSON will match the same pattern with one.
"""

from functools import lru_cache
from typing import NamedTuple

from mmengine.structured_output.json_schema.characters import ANY, PatternError, check_alternatives
from mmengine.structured_output.json_schema.matching import Budget
from mmengine.structured_output.json_schema.pattern_parts import Parser, Part, has_anchor, joined

MAX_CHARS = 2_000


class Pattern(NamedTuple):
    regex: str  # matches a whole string, in the grammar engine's and (without \p) in Python's dialect
    prefix: str | None  # set when the pattern is "starts with this text" and nothing more
    budget: Budget | None = None  # what comparing may take; only patterns of keys are compared
    exact: bool = True  # whether it matches all that it stands for, and not a little less

    def matches(self, text: str) -> bool:
        if "\\p" in self.regex or "\\P" in self.regex:
            raise PatternError("with \\p it cannot be compared with the names in properties")
        return (self.budget or Budget()).matches(self.regex, text)


def anchored(branches: list[list[Part]], left: bool, right: bool) -> list[str]:
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
        body = "".join(part.text for part in parts)
        out.append(f"{'' if at_start else ANY + '*'}{body}{'' if at_end else ANY + '*'}")
    return out


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
    joined([[part for part in parts if not part.anchor] for parts in branches])
    prefix = None
    if len(branches) == 1 and branches[0] and branches[0][0].anchor == "^":
        prefix = joined([branches[0][1:]]).literal if not has_anchor([branches[0][1:]]) else None
    alternatives = anchored(branches, False, False)
    return Pattern(
        "|".join(alternatives) if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})", prefix
    )
