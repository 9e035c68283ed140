"""Parses regular expressions to syntax trees.

The parser accepts characters, sets, groups, alternatives and repetitions, which mean the same in Rust's
dialect and in the patterns from json_schema/patterns/pattern.py. A regex must match a whole text.
"""

import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from mmengine.structured_output.regex.sets import LAST, Ranges, Set, complement, set_of
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Repeat, Seq

MAX_NESTING = 200  # Maximum nesting depth of groups.
_ANY = tuple(complement([]))
_LINE = tuple(complement([(10, 10)]))  # The characters that . matches outside (?s:…).
_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_POINT = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xu]\{([0-9a-fA-F]{1,8})\}")
_GROUP = re.compile(r"\((?:\?s?:|(?!\?))")
_DASH = re.compile(r"-(?!\])")
_SET_WORDS = re.compile(r"&&|--|~~|\[")
_MARK = re.compile(r"[^A-Za-z0-9<>\s]")
_REPEATS = frozenset("*+?{")
_TIMES = re.compile(r"\*|\+|\?|\{(\d{1,6})(?:(,)(\d{0,6}))?\}")


class UnsupportedRegex(ValueError):
    """Raised for a construct that the parser does not support."""


def _as_written(ranges: Ranges, negated: bool) -> Set:
    return tuple(complement(ranges)) if negated else set_of(ranges)


def parse_regex(
    text: str,
    classes: Mapping[str, Ranges] | None = None,
    nesting: int = MAX_NESTING,
    meaning: Callable[[Ranges, bool], Set] = _as_written,
    engine: str = "",
) -> Node:
    r"""Parse a regex and return its tree. Raises UnsupportedRegex.

    `classes` maps an escape's letter to its set, such as d for \d. The capital letter, such as \D, stands for
    the complement. `nesting` is the maximum nesting depth of groups. `meaning` returns the set for a bracket
    expression such as [^a-z]. The arguments are its ranges, and whether it is negated. `engine` is the
    grammar engine's name for error messages.
    """
    return _Reader(text, classes or {}, nesting, meaning, engine).whole()


class _Reader:
    def __init__(
        self,
        text: str,
        classes: Mapping[str, Ranges],
        nesting: int,
        meaning: Callable[[Ranges, bool], Set],
        engine: str,
    ):
        self._unknown = f"is not known with {engine}" if engine else "is not known"
        self._text, self._at = text, 0
        self._classes, self._nesting, self._meaning = classes, nesting, meaning
        self._dot = _LINE

    def whole(self) -> Node:
        """Parse the whole text.

        The method does not recurse, because a pattern that excludes names has a nested group per letter.
        """
        # For each open group: the alternatives outside the group, and the meaning of . outside the group.
        outer: list[tuple[list[list[Node]], Set]] = []
        options: list[list[Node]] = [[]]
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "(" and (group := self._take(_GROUP)):
                if len(outer) >= self._nesting:
                    self._fail(f"groups are nested more than {self._nesting} deep")
                outer.append((options, self._dot))
                options, self._dot = [[]], _ANY if "s" in group[0] else self._dot
            elif char == "|":
                self._at += 1
                options.append([])
            elif char == ")" and outer:
                self._at += 1
                node = _either(options)
                options, self._dot = outer.pop()
                options[-1].append(self._repeated(node))
            else:
                options[-1].append(self._repeated(Chars(self._set())))
        if outer:
            self._fail("a group is not closed")
        return _either(options)

    def _fail(self, why: str) -> NoReturn:
        raise UnsupportedRegex(f"{why} (character {self._at + 1} of the regex)")

    def _has(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _set(self) -> Set:
        """Parse a character, a class or a bracket expression, and return its set of characters."""
        if self._has("["):
            return self._listed()
        if self._has("."):
            return self._dot
        if self._has("\\"):
            return set_of(self._escaped())
        char = self._text[self._at]
        if char == ")":
            self._fail("a ) has no matching (")
        if char in "^$":
            self._fail(f"{char} {self._unknown}: the whole text has to match anyway")
        if char in "(*+?{":
            self._fail(f"{self._text[self._at : self._at + 3]!r} {self._unknown}")
        self._at += 1
        return ((ord(char), ord(char)),)

    def _escaped(self) -> Ranges:
        letter = self._text[self._at : self._at + 1]
        if letter.lower() in self._classes:
            self._at += 1
            found = self._classes[letter.lower()]
            return complement(found) if letter.isupper() else found
        if letter in _ESCAPES:
            self._at += 1
            return [(_ESCAPES[letter], _ESCAPES[letter])]
        if coded := self._take(_POINT):
            point = int(coded[coded.lastindex or 1], 16)
            if point > LAST or 0xD800 <= point <= 0xDFFF:
                self._fail(f"U+{point:04X} is not a character")
            return [(point, point)]
        if not letter.isascii() or not (plain := self._take(_MARK)):
            self._fail(f"\\{letter} {self._unknown}; name the characters instead, as in [0-9]")
        return [(ord(plain[0]), ord(plain[0]))]

    def _listed(self) -> Set:
        negated = self._has("^")
        ranges: Ranges = []
        while not self._has("]"):
            found = self._member()
            if self._take(_DASH):
                last = self._member()
                if not _is_single(found) or not _is_single(last) or last[0][0] < found[0][0]:
                    self._fail("a character range is out of order")
                found = [(found[0][0], last[0][0])]
            ranges += found
        if not ranges:
            self._fail(f"[] {self._unknown}")
        return self._meaning(ranges, negated)

    def _member(self) -> Ranges:
        if self._has("\\"):
            return self._escaped()
        if self._take(_SET_WORDS) or self._at >= len(self._text):
            self._fail("a character set is not closed, or contains [, && , -- or ~~")
        if self._text[self._at] == "]":
            self._fail("a range of characters has no end")
        self._at += 1
        return [(ord(self._text[self._at - 1]), ord(self._text[self._at - 1]))]

    def _repeated(self, node: Node) -> Node:
        found = self._take(_TIMES) if self._text[self._at : self._at + 1] in _REPEATS else None
        if not found:
            return node
        self._has("?")  # A lazy quantifier matches the same texts as a greedy quantifier.
        if self._text[self._at : self._at + 1] in _REPEATS:
            self._fail("a repetition is repeated; put the inner one in a group")
        if not found[1]:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[0]]
            return Repeat(node, low, high)
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if high is not None and high < low:
            self._fail("a repetition's minimum exceeds its maximum")
        return Repeat(node, low, high)


def _either(options: list[list[Node]]) -> Node:
    nodes = [parts[0] if len(parts) == 1 else Seq(tuple(parts)) for parts in options]
    return nodes[0] if len(nodes) == 1 else Alt(tuple(nodes))


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
