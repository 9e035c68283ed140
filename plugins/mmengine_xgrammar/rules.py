"""Builds a grammar in EBNF (the GBNF dialect that xgrammar reads), rule by rule.

In texts, only ASCII letters and digits are written as they are. All other characters are written as code
points, because they may have a meaning in EBNF.
"""

from os.path import commonprefix

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.structured_output.regex.sets import Ranges

MAX_RULES = 20_000
# Maximum number of counted repetitions. Each repetition costs xgrammar 18 to 40 ms with a vocabulary of
# 150,000 tokens.
MAX_COUNTED = 128
FEW_WORDS = 8
MAX_DEPTH = 200  # Maximum recursion depth of `words`.
EMPTY = '""'


class Rules:
    """A set of named expressions. Equal expressions share a name."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, body: str) -> str:
        """Return the name of the rule with `body`, and add the rule if it is new."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self._bodies[self._names[body]] = body
        return self._names[body]

    def tail(self, end: str) -> str:
        """Return `end` as a single symbol, which several alternatives can repeat."""
        return end if " " not in end else self.add(end)

    def reserve(self) -> str:
        """Return a name whose rule is defined later, with `give`."""
        if len(self._bodies) >= MAX_RULES:
            raise InvalidRequest(
                f"the grammar needs more than {MAX_RULES:,} rules for xgrammar",
                code=ErrorCode.INVALID_GRAMMAR,
            )
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def give(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def text(self, root: str) -> str:
        """Return the whole grammar, which starts with the expression `root`."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"

    def counted(self, ways: list[str], low: int, high: int | None, end: str = EMPTY) -> str:
        """Return an expression for `low` to `high` items (None: no maximum) followed by `end`. Each item
        matches an alternative in `ways`, none of which may match the empty text.

        Each count has its own rule, and an unbounded repetition is a recursive rule. With xgrammar's own
        {low,high} and *, masks would take milliseconds for nested groups, adjacent repetitions, and items
        that are not a character set.
        """
        rule = self.add(end) if high is not None else self._endless(ways, end)
        high = low if high is None else high
        for done in range(high - 1, -1, -1):
            more = " | ".join(f"{way} {rule}" for way in ways)
            rule = self.add(f"{more} | {end}" if done >= low else more)
        return rule

    def _endless(self, ways: list[str], end: str) -> str:
        body = f"({' | '.join(ways)})* {end}"
        if body not in self._names:
            name = self._names[body] = self.reserve()
            self.give(name, " | ".join([*(f"{way} {name}" for way in ways), end]))
        return self._names[body]

    def words(self, words: list[str], depth: int = 0) -> str:
        """Return an expression for any of `words`. Common prefixes are written once, because xgrammar
        compares all alternatives with each other.
        """
        if len(words) <= FEW_WORDS or depth >= MAX_DEPTH:
            return self.add(" | ".join(map(literal, words)))
        groups: dict[str, list[str]] = {}
        for word in words:
            groups.setdefault(word[:1], []).append(word)
        ways = []
        for group in groups.values():
            start = commonprefix(group)
            rest = [word[len(start) :] for word in group]
            ways.append(
                literal(start) if len(group) == 1 else f"{literal(start)} {self.words(rest, depth + 1)}"
            )
        return self.add(" | ".join(ways))


def literal(text: str) -> str:
    return '"' + "".join(map(_escaped, text)) + '"'


def char_set(ranges: Ranges) -> str:
    """Return an expression for one or more character ranges."""
    inside = (
        _escaped(chr(low)) + (f"-{_escaped(chr(high))}" if high > low else "") for low, high in sorted(ranges)
    )
    return f"[{''.join(inside)}]"


def either(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _escaped(char: str) -> str:
    if char.isascii() and char.isalnum():
        return char
    return f"\\u{ord(char):04X}" if ord(char) < 0x10000 else f"\\U{ord(char):08X}"
