"""Regular expressions as EBNF: of a text as it stands, or of a JSON string as it is spelled.

Read is what json_schema/pattern.py writes and what Rust's dialect means by the same: characters, sets,
groups, alternatives, counted and uncounted repetitions. Everything else is refused by name.
"""

import re
from dataclasses import dataclass, replace
from typing import NoReturn

from mmengine.structured_output.regex.sets import LAST, Ranges, complement
from mmengine_xgrammar.rules import EMPTY, MAX_COUNTED, Rules, char_set, literal

MAX_NESTING = 64
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}  # JSON's escapes of two characters
CONTROLS: Ranges = [(0, 31)]
PLAIN = complement([*CONTROLS, (34, 34), (92, 92)])  # characters that stand for themselves in JSON
ANY: Ranges = complement([])


class RegexRefused(ValueError):
    """What of a regular expression cannot be enforced with xgrammar."""


@dataclass(frozen=True, slots=True)
class Set:
    ranges: tuple[tuple[int, int], ...]  # none: matches nothing


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeated:
    part: "Node"
    low: int
    high: int | None


Node = Set | Sequence | Alternatives | Repeated


def read_regex(text: str) -> Node:
    """Raises RegexRefused. `^(?:…)$`, as schemas have it, is the whole text, which is meant anyway."""
    if text.startswith("^(?:") and text.endswith(")$"):
        text = text[1:-1]
    reader = _Reader(text)
    node = reader.alternatives()
    if reader.at < len(text):
        reader.fail("a ) closes no group")
    return node


class _Reader:
    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0
        self.dot = complement([(10, 10)])

    def fail(self, why: str) -> NoReturn:
        raise RegexRefused(f"{why} (character {self.at + 1} of the regex)")

    def take(self, pattern: str) -> re.Match | None:
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def alternatives(self) -> Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"groups are nested more than {MAX_NESTING} deep")
        parts = [self.sequence()]
        while self.take(r"\|"):
            parts.append(self.sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Alternatives(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def atom(self) -> Node:
        if found := self.take(r"\((?:\?s?:|(?!\?))"):
            dot, self.dot = self.dot, ANY if "s" in found[0] else self.dot
            node = self.alternatives()
            self.dot = dot
            if not self.take(r"\)"):
                self.fail("a group is not closed")
            return node
        if self.take(r"\["):
            return self.char_class()
        if self.take(r"\."):
            return Set(tuple(self.dot))
        if self.take(r"\\"):
            point = self.escaped()
            return Set(((point, point),))
        char = self.text[self.at]
        if char in "^$":
            self.fail(f"{char} is not known: the whole text has to match anyway")
        if char in "(*+?{":
            self.fail(f"{self.text[self.at : self.at + 3]!r} is not known with xgrammar")
        self.at += 1
        return Set(((ord(char), ord(char)),))

    def escaped(self) -> int:
        if found := self.take(r"[nrtfv]"):
            return {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}[found[0]]
        if found := self.take(
            r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xu]\{([0-9a-fA-F]{1,8})\}"
        ):
            point = int(found[found.lastindex or 1], 16)
            if point > LAST or 0xD800 <= point <= 0xDFFF:
                self.fail(f"U+{point:04X} is no character")
            return point
        if not (found := self.take(r"[^A-Za-z0-9<>\s]")) or not found[0].isascii():
            known = "name the characters instead, as in [0-9]"
            self.fail(f"\\{self.text[self.at : self.at + 1]} is not known with xgrammar; {known}")
        return ord(found[0])

    def char_class(self) -> Node:
        negated = self.take(r"\^")
        ranges: Ranges = []
        while not self.take(r"\]"):
            low = high = self.member()
            if self.take(r"-(?!\])"):
                high = self.member()
                if high < low:
                    self.fail("a range of characters has no order")
            ranges.append((low, high))
        if not ranges:
            self.fail("[] is not known with xgrammar")
        outside = complement(ranges)
        return Set(tuple(outside if negated else complement(outside)))

    def member(self) -> int:
        if self.take(r"\\"):
            return self.escaped()
        if self.take(r"&&|--|~~|\[") or self.at >= len(self.text):
            self.fail("a set of characters is not closed, or holds [, && , -- or ~~")
        if self.text[self.at] == "]":
            self.fail("a range of characters has no end")
        self.at += 1
        return ord(self.text[self.at - 1])

    def repeated(self, part: Node) -> Node:
        found = self.take(r"\*|\+|\?|\{(\d{1,6})(?:(,)(\d{0,6}))?\}")
        if not found:
            return part
        self.take(r"\?")  # lazy: the same language
        if self.take(r"[*+?{]"):
            self.fail("a repetition is repeated; put it in a group")
        if not found[1]:
            if found[0] != "?" and loops(part):
                self.fail("a repetition of a repetition matches in too many ways; use one of them")
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
            return Repeated(part, low, high)
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if high is not None and high < low:
            self.fail("a repetition's least is more than its most")
        if high is None and loops(part):
            self.fail("a repetition of a repetition matches in too many ways; use one of them")
        return Repeated(part, low, high)


def loops(node: Node) -> bool:
    """Whether it is an endless repetition, or may be nothing but one."""
    match node:
        case Repeated(part, _, high):
            return high is None or loops(part)
        case Sequence(parts):
            return any(
                loops(part) and all(width(each)[0] == 0 for each in parts if each is not part)
                for part in parts
            )
        case Alternatives(parts):
            return any(map(loops, parts))
    return False


def width(node: Node) -> tuple[int, int | None]:
    """Fewest and most characters that it matches; None for any number."""
    match node:
        case Set():
            return 1, 1
        case Sequence(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths]
            return sum(low for low, _ in widths), None if None in highs else sum(highs)  # type: ignore[arg-type]
        case Alternatives(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths]
            return min(low for low, _ in widths), None if None in highs else max(highs)  # type: ignore[type-var]
        case Repeated(part, low, high):
            fewest, most = width(part)
            return low * fewest, 0 if most == 0 else None if None in (high, most) else high * most  # type: ignore[operator]


def of_width(node: Node, low: int, high: int | None) -> Node | None:
    """What of `node` has `low` to `high` characters; None where that is no matter of one repetition."""
    fewest, most = width(node)
    if fewest >= low and (high is None or most is not None and most <= high):
        return node
    if isinstance(node, Alternatives):
        found = [of_width(part, low, high) for part in node.parts]
        kept = tuple(part for part in found if part is not None)
        return Alternatives(kept) if len(kept) == len(found) else None
    parts = node.parts if isinstance(node, Sequence) else (node,)
    loose = [at for at, part in enumerate(parts) if width(part)[0] != width(part)[1]]
    if len(loose) != 1:
        return None
    repeated = parts[loose[0]]
    if not isinstance(repeated, Repeated) or width(repeated.part) != (1, 1):
        return None
    others = fewest - repeated.low
    least = max(repeated.low, low - others)
    ends = [end for end in (repeated.high, None if high is None else high - others) if end is not None]
    if ends and min(ends) < least:
        return None
    narrowed = replace(repeated, low=least, high=min(ends) if ends else None)
    return Sequence((*parts[: loose[0]], narrowed, *parts[loose[0] + 1 :]))


def write_regex(node: Node, rules: Rules, *, in_json: bool, end: str = EMPTY) -> str:
    """An expression for `node` and then `end`; `in_json`: as it is spelled between the quotes of a JSON
    string. Raises RegexRefused where too much had to be counted."""
    match node:
        case Set(ranges):
            ways = _set_ways(ranges, in_json)
            if len(ways) == 1:
                return f"{ways[0]} {end}"
            end = rules.tail(end)
            return rules.add(" | ".join(f"{way} {end}" for way in ways))
        case Sequence(parts):
            for part in reversed(parts):
                end = write_regex(part, rules, in_json=in_json, end=end)
            return end
        case Alternatives(parts):
            end = rules.tail(end)
            return rules.add(" | ".join(write_regex(part, rules, in_json=in_json, end=end) for part in parts))
        case Repeated(part, low, high):
            return _write_repeated(part, low, high, rules, in_json, end)


def _write_repeated(part: Node, low: int, high: int | None, rules: Rules, in_json: bool, end: str) -> str:
    if max(low, high or 0) > MAX_COUNTED:
        raise RegexRefused(f"more than {MAX_COUNTED} repetitions cannot be counted with xgrammar")
    if width(part)[0] == 0 and high != 1:
        raise RegexRefused("a repetition of what may be empty matches in too many ways")
    match part:
        case Set(ranges):
            ways = _set_ways(ranges, in_json)
        case _:
            ways = [write_regex(part, rules, in_json=in_json)]
    return rules.counted(ways, low, high, rules.tail(end))


def _set_ways(ranges: tuple[tuple[int, int], ...], in_json: bool) -> list[str]:
    """A set of characters, as alternatives."""
    if not ranges:
        raise RegexRefused("a set of no characters matches nothing")
    if not in_json:
        return [char_set(list(ranges))]
    outside = complement(list(ranges))
    plain = complement([*outside, *complement(PLAIN)])
    ways = [char_set(plain)] if plain else []
    escaped = [p for p in (*range(32), 34, 92) if any(low <= p <= high for low, high in ranges)]
    if short := [SHORT[point] for point in escaped if point in SHORT]:
        ways.append(f'"\\\\" {char_set([(ord(char), ord(char)) for char in short])}')
    if len(escaped) == 34:
        return [*ways, '"\\\\u00" [01] [0-9a-fA-F]']
    return [*ways, *(literal(f"\\u{point:04x}") for point in escaped if point not in SHORT)]
