"""Parses a grammar's text in llama.cpp's GBNF or xgrammar's EBNF into rules.

A rule may span several lines, as in EBNF.
"""

import re
from typing import NoReturn

from mmengine.errors import ErrorCode, InvalidRequest, shown
from mmengine.structured_output.regex.sets import LAST, complement, set_of
from mmengine.structured_output.regex.tree import (
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    references,
)

MAX_GBNF_CHARS = 64 * 1024
MAX_GBNF_RULES = 2_000
MAX_GROUPS = 64  # Maximum nesting depth of groups.
MAX_REPEATS = 10_000  # Maximum number in a repetition {m,n}.
ANY = tuple(complement(()))
_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|#[^\n]*)|(?P<line>\n)|(?P<head>[A-Za-z][\w-]*(?=[ \t]*::=))|(?P<name>[A-Za-z][\w-]*)"
    r'|(?P<define>::=)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\\n]|\\.)*\])'
    r"|(?P<count>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})|(?P<mark>[.()|*+?])"
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{each: each for each in "\\\"'[]-^/"}}
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_grammar(text: str) -> dict[str, Node]:
    """Return the rules by name.

    Raises InvalidRequest with the line number if the text is not a grammar, has no rule `root`, or refers to
    an unknown rule.
    """
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidRequest(
            f"the grammar has more than {MAX_GBNF_CHARS:,} characters", code=ErrorCode.INVALID_GRAMMAR
        )
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise InvalidRequest(
            "the grammar has no rule called root, the start rule", code=ErrorCode.INVALID_GRAMMAR
        )
    for each in references(rules.values()):
        if each.name not in rules:
            _refuse(each.line, f"there is no rule called {shown(each.name)}")
    return rules


def _refuse(line: int, what: str) -> NoReturn:
    raise InvalidRequest(f"the grammar's line {line}: {what}", code=ErrorCode.INVALID_GRAMMAR)


class _Parser:
    def __init__(self, text: str):
        self._text, self._at, self._line = text, 0, 1
        self._kind, self._value = "", ""
        self._next()

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        while self._kind:
            name, line = self._value, self._line
            if self._kind != "head":
                _refuse(line, f"expected a rule (name ::= …), not {shown(self._value)}")
            if name in found:
                _refuse(line, f"the rule {shown(name)} is defined twice")
            if len(found) >= MAX_GBNF_RULES:
                _refuse(line, f"there are more than {MAX_GBNF_RULES:,} rules")
            self._next()
            self._next()  # Skips the ::= sign.
            found[name] = self._alternatives(0)
        return found

    def _next(self) -> None:
        """Advance to the next token, and skip line ends and comments."""
        while self._at < len(self._text):
            found = _TOKEN.match(self._text, self._at)
            if found is None:
                _refuse(self._line, f"{shown(self._text[self._at : self._at + 20])} cannot be read")
            self._at, self._kind, self._value = found.end(), found.lastgroup or "", found.group()
            if self._kind == "line":
                self._line += 1
            elif self._kind != "space":
                self._line_of_token = self._line
                return
        self._kind, self._value = "", "the end"

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_GROUPS:
            _refuse(self._line, f"groups are nested more than {MAX_GROUPS} deep")
        options = [self._sequence(depth)]
        while self._value == "|" and self._kind == "mark":
            self._next()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while True:
            item = self._item(depth)
            if item is None:
                return items[0] if len(items) == 1 else Seq(tuple(items))
            while self._kind == "count" or (self._kind == "mark" and self._value in _TIMES):
                item = Repeat(item, *self._times())
                self._next()
            items.append(item)

    def _item(self, depth: int) -> Node | None:
        kind, value, line = self._kind, self._value, self._line
        if kind in ("head", "") or (kind == "mark" and value in "|)"):
            return None
        item: Node
        if kind == "name":
            item = Ref(value, line)
        elif kind == "text":
            item = Seq(tuple(Chars(((code, code),)) for code, _ in self._characters(value[1:-1])))
        elif kind == "set":
            item = self._set(value[1:-1])
        elif value == ".":
            item = Chars(ANY)
        elif value == "(":
            self._next()
            item = self._alternatives(depth + 1)
            if self._value != ")":
                _refuse(line, "a group that begins here is not closed")
        else:
            _refuse(line, f"{shown(value)} is not allowed here")
        self._next()
        return item

    def _times(self) -> tuple[int, int | None]:
        if self._kind == "mark":
            return _TIMES[self._value]
        low, comma, high = (part.strip() for part in self._value[1:-1].partition(","))
        times = int(low), int(high) if high else None if comma else int(low)
        if times[1] is not None and times[0] > times[1]:
            _refuse(self._line, f"{self._value} has a minimum above its maximum")
        if max(times[0], times[1] or 0) > MAX_REPEATS:
            _refuse(self._line, f"{self._value} repeats more than {MAX_REPEATS:,} times")
        return times

    def _set(self, inner: str) -> Node:
        negated = inner.startswith("^")
        found = self._characters(inner[negated:])
        pairs, at = [], 0
        while at < len(found):
            low = high = found[at][0]
            if at + 2 < len(found) and found[at + 1] == (ord("-"), False):
                high, at = found[at + 2][0], at + 2
            if low > high:
                _refuse(self._line, f"a range of [{inner}] ends before it begins")
            pairs.append((low, high))
            at += 1
        ranges = tuple(complement(pairs)) if negated else set_of(pairs)
        if not ranges:
            _refuse(self._line, f"[{inner}] allows no character")
        return Chars(ranges)

    def _characters(self, inner: str) -> list[tuple[int, bool]]:
        """Return pairs of a code point and whether it was escaped."""
        out = []
        for found in _ESCAPE.finditer(inner):
            digits = found[1] or found[2] or found[3]
            plain = _PLAIN_ESCAPES.get(found[4]) if found[4] else found[5]
            if digits is None and plain is None:
                _refuse(self._line, f"the escape {shown(found.group())} is unknown")
            code = int(digits, 16) if digits else ord(plain or "")
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                _refuse(self._line, f"{found.group()} is not a character")
            out.append((code, found[5] is None))
        return out
