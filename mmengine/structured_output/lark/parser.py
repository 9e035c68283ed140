"""Parses a tool's Lark grammar into rules. Terminals are treated like rules.

The parser refuses %ignore and other directives (except %import), rules with options or parameters, terminals
with & or ~, and special tokens.
"""

import re
from typing import NoReturn

from mmengine.structured_output.lark.common import COMMON
from mmengine.structured_output.regex.parser import UnsupportedRegex, parse_regex
from mmengine.structured_output.regex.sets import WORD, Ranges
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Ref, Repeat, Seq, references

MAX_CHARS = 64 * 1024  # Maximum number of characters in a tool's grammar.
MAX_RULES = 2_000  # Maximum number of rules and terminals in a tool's grammar.
MAX_NESTING = 64  # Maximum nesting depth of groups.
MAX_REPEATS = 10_000  # Maximum count of a repetition.
_WHITE: Ranges = [
    *((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
# Subsets of Lark's Unicode classes. \D and \W are not supported: a negated subset would match characters that
# Lark's class excludes.
_CLASSES = {"d": [(48, 57)], "w": WORD, "s": _WHITE}
_NEGATED_CLASS = re.compile(r"\\[DW]|\[\^(?:\\.|[^\]\\])*?\\[dwDW]")
_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|#[^\n]*)"
    r"|(?P<head>[?!]*[A-Za-z_]\w*(?=[ \t]*:))|(?P<name>[A-Za-z_]\w*)|(?P<colon>:)"
    r"|(?P<import>%import\s+common[ \t]*(?:\.[ \t]*\w+(?:[ \t]*->[ \t]*\w+)?|\([\w, \t]+\)))"
    r'|(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")|(?P<text>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)|(?P<alias>->\s*\w+)"
    r"|(?P<count>~\s*\d{1,6}(?:\s*\.\.\s*\d{1,6})?|\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})"
    r"|(?P<mark>[()|*+?\[\]])"
)
_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|([nrtfb"\\/]))|(\\)')
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class UnsupportedLark(ValueError):
    """Raised for a grammar that is invalid or not supported."""


def parse_lark(text: str) -> dict[str, Node]:
    """Return the rules and terminals by name, including the rule `start`. Raises UnsupportedLark."""
    if len(text) > MAX_CHARS:
        raise UnsupportedLark(f"it has {len(text):,} characters; the limit is {MAX_CHARS:,}")
    rules = _Parser(text).rules()
    if "start" not in rules:
        raise UnsupportedLark("it has no rule called start")
    for each in references(rules.values()):
        if each.name not in rules:
            raise UnsupportedLark(f"line {each.line}: there is no rule {each.name!r:.60}")
    return rules


class _Parser:
    def __init__(self, text: str):
        self._text, self._at, self._line = text, 0, 1
        self._kind, self._value = "", ""
        self._next()

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._kind:
            if self._kind == "import":
                for name, alias in _imported(self._value):
                    if name not in COMMON:
                        self._fail(f"%import common.{name:.40} is not supported; define the terminal")
                    self._define(found, alias, self._regex(COMMON[name], ""))
                self._next()
                continue
            name = self._value.lstrip("?!")
            if self._kind != "head":
                self._fail(f"expected a rule (name: …), not {self._value!r:.40}")
            self._next()
            self._next()  # Skips the colon.
            self._define(found, name, self._alternatives(0))
        return found

    def _define(self, found: dict[str, Node], name: str, node: Node) -> None:
        if name in found:
            self._fail(f"{name!r:.60} is defined twice")
        if len(found) >= MAX_RULES:
            self._fail(f"there are more than {MAX_RULES:,} rules")
        found[name] = node

    def _fail(self, why: str) -> NoReturn:
        raise UnsupportedLark(f"line {self._line}: {why}")

    def _next(self) -> None:
        """Advance to the next token, and skip white space and comments."""
        while self._at < len(self._text):
            found = _TOKEN.match(self._text, self._at)
            if found is None:
                rest = self._text[self._at :].split("\n", 1)[0]
                self._fail(f"{rest!r:.40} is not supported")
            self._line += self._text.count("\n", self._at, found.end())
            self._at, self._kind, self._value = found.end(), found.lastgroup or "", found[0]
            if self._kind != "space":
                return
        self._kind, self._value = "", "the end"

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            self._fail(f"groups are nested more than {MAX_NESTING} deep")
        options = [self._sequence(depth)]
        while self._value == "|" and self._kind == "mark":
            self._next()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while (item := self._item(depth)) is not None:
            while self._kind == "count" or self._kind == "mark" and self._value in _TIMES:
                item = Repeat(item, *self._times())
                self._next()
            items.append(item)
        if self._kind == "alias":
            self._next()
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _item(self, depth: int) -> Node | None:
        kind, value = self._kind, self._value
        if kind in ("head", "import", "alias", "") or kind == "mark" and value in "|)]":
            return None
        item: Node
        match kind, value:
            case "name", _:
                item = Ref(value, self._line)
            case "text", _:
                item = self._string(value)
            case "range", _:
                item = self._range(value)
            case "regex", _:
                body, _, flags = value[1:].rpartition("/")
                item = self._regex(body, flags)
            case "mark", "(" | "[":
                self._next()
                item = self._alternatives(depth + 1)
                if self._value != {"(": ")", "[": "]"}[value]:
                    self._fail("a group is not closed")
                item = Repeat(item, 0, 1) if value == "[" else item
            case _:
                self._fail(f"{value!r:.40} is not supported here")
        self._next()
        return item

    def _times(self) -> tuple[int, int | None]:
        if self._kind == "mark":
            return _TIMES[self._value]
        numbers = re.findall(r"\d+", self._value)
        low, high = int(numbers[0]), int(numbers[-1])
        if high < low or high > MAX_REPEATS:
            self._fail(f"{self._value!r:.40} must count up to at most {MAX_REPEATS:,}")
        is_open = self._value[0] == "{" and len(numbers) == 1 and "," in self._value
        return low, None if is_open else high

    def _string(self, value: str) -> Node:
        text, is_folded = value.removesuffix("i"), value.endswith("i")
        characters = self._characters(text)
        if is_folded and not text.isascii():
            self._fail(f"{value!r:.60}: only ASCII is supported with the flag i")
        cases = [{char, char.lower(), char.upper()} if is_folded else {char} for char in characters]
        return Seq(tuple(Chars(tuple((ord(char), ord(char)) for char in sorted(each))) for each in cases))

    def _range(self, value: str) -> Node:
        first, last = (self._characters(part) for part in re.findall(r'"(?:\\.|[^"\\\n])+"', value))
        if len(first) != 1 or len(last) != 1 or last < first:
            self._fail(f"{value!r:.60} is not a range of characters")
        return Chars(((ord(first), ord(last)),))

    def _characters(self, quoted: str) -> str:
        def decoded(found: re.Match[str]) -> str:
            if found[4]:
                self._fail(f"{quoted!r:.60} has an unknown escape")
            code = found[1] or found[2]
            return chr(int(code, 16)) if code else _LETTERS.get(found[3], found[3])

        text = _ESCAPE.sub(decoded, quoted[1:-1])
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            self._fail(f"{quoted!r:.60} has half a surrogate pair")
        return text

    def _regex(self, body: str, flags: str) -> Node:
        if flags.strip("s"):
            self._fail(f"the flags {flags!r:.20} of a regular expression are not supported")
        if _NEGATED_CLASS.search(body):
            self._fail(f"/{body:.60}/: \\D, \\W and a negated \\d or \\w are not supported")
        try:
            return parse_regex(f"(?s:{body})" if flags else body, _CLASSES, MAX_NESTING)
        except UnsupportedRegex as error:
            self._fail(f"/{body:.60}/: {error}")


def _imported(text: str) -> list[tuple[str, str]]:
    """Return (name, alias) for each terminal in an %import."""
    names = re.findall(r"\w+", text.removeprefix("%import").strip().removeprefix("common"))
    return [(names[0], names[-1])] if "(" not in text else [(name, name) for name in names]
