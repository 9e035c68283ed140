"""Parses JSON text in pieces, and returns the part of the value that is known so far. Also parses complete
JSON texts that are nested too deeply for Python's parser.

The value only grows. A string is included up to its last known character; an incomplete escape or surrogate
pair is left out. Numbers and literals are included when they are complete. Arrays and objects are included
from their opening bracket. A key is included when a part of its value is included.
"""

import json
import re
from typing import Any

JsonValue = Any  # A value as json.loads returns it.
_SPECIAL = re.compile(r'["\\]')
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LITERALS = {"true": True, "false": False, "null": None}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SPACE = " \t\r\n"


class PartialJson:
    """A parser that accepts a JSON text in pieces and returns the value so far. The text must be valid."""

    def __init__(self) -> None:
        self._root: list[JsonValue] = []  # Contains the value once it has begun.
        # Open lists and objects, each with the key or index of its last value.
        self._open: list[tuple[JsonValue, JsonValue]] = []
        self._key: str | None = None  # A key whose value is not known yet.
        self._string: list[str] | None = None  # The pieces of an unfinished string.
        self._is_key = False  # Whether the unfinished string is a key.
        self._atom = ""  # An unfinished number or literal.
        self._held = ""  # The beginning of an unfinished escape.

    @property
    def has_value(self) -> bool:
        """Whether any part of the value is known."""
        return bool(self._root)

    @property
    def is_complete(self) -> bool:
        """Whether the text is a complete value."""
        return bool(self._root) and not self._open and self._string is None

    def value(self) -> JsonValue:
        """Return the value so far, with the types that `json.loads` returns.

        The caller must not modify the value, because values from later calls share its complete parts.
        """
        child: JsonValue = None
        for depth in range(len(self._open) - 1, -1, -1):
            container, place = self._open[depth]
            copy = container.copy()
            if depth + 1 < len(self._open):
                copy[place] = child
            child = copy
        return child if self._open else self._root[0]

    def push(self, text: str) -> bool:
        """Append text, and return whether the known value grew."""
        text, self._held = self._held + text, ""
        at, changed = 0, False
        while at < len(text):
            if self._string is not None:
                at, more = self._read_string(text, at)
                if at < 0:
                    return changed or more
            else:
                at, more = at + 1, self._read(text[at])
            changed = changed or more
        return changed

    def finish(self) -> bool:
        """End the text, and return whether the end completed a number."""
        return self._end_atom()

    def _read(self, character: str) -> bool:
        if character in _SPACE:
            return self._end_atom()
        if character in ",}]":
            changed = self._end_atom()
            if character != ",":
                self._open.pop()
            return changed
        if character == ":":
            return False
        if character in "{[":
            container: JsonValue = {} if character == "{" else []
            self._put(container)
            self._open.append((container, None))
            return True
        if character == '"':
            self._string = []
            self._is_key = self._key is None and bool(self._open) and isinstance(self._open[-1][0], dict)
            if not self._is_key:
                self._put("")
            return not self._is_key
        self._atom += character
        return self._end_atom() if self._atom in _LITERALS else False

    def _end_atom(self) -> bool:
        atom, self._atom = self._atom, ""
        if not atom:
            return False
        if atom in _LITERALS:
            self._put(_LITERALS[atom])
        else:
            self._put(float(atom) if any(each in ".eE" for each in atom) else int(atom))
        return True

    def _put(self, value: JsonValue) -> None:
        if not self._open:
            self._root.append(value)
            return
        container, _ = self._open[-1]
        if isinstance(container, dict):
            place: JsonValue = self._key
            container[place], self._key = value, None
        else:
            place = len(container)
            container.append(value)
        self._open[-1] = container, place

    def _read_string(self, text: str, at: int) -> tuple[int, bool]:
        """Return (next position, whether the value grew).

        The position is -1 if the remaining text must wait for more text.
        """
        assert self._string is not None
        special = _SPECIAL.search(text, at)
        end = special.start() if special is not None else len(text)
        pieces = [text[at:end]] if end > at else []
        while end < len(text) and text[end] == "\\":
            size = _escape_size(text, end)
            if end + size > len(text):
                self._held, end = text[end:], -1
                break
            pieces.append(_unescaped(text[end : end + size]))
            end += size
        self._string += pieces
        if end >= 0 and end < len(text) and text[end] == '"':
            self._end_string()
            return end + 1, bool(pieces)
        if pieces and not self._is_key:
            self._replace("".join(self._string))
        return end, bool(pieces) and not self._is_key

    def _end_string(self) -> None:
        whole = "".join(self._string or ())
        self._string = None
        if self._is_key:
            self._key = whole
        else:
            self._replace(whole)

    def _replace(self, value: str) -> None:
        """Replace the last value, an unfinished string, by the longer string."""
        if self._open:
            container, place = self._open[-1]
            container[place] = value
        else:
            self._root[0] = value


def _escape_size(text: str, at: int) -> int:
    """Return the length of the escape at `at`. A surrogate pair counts as a single escape."""
    if text[at + 1 : at + 2] != "u":
        return 2
    if not _HIGH.match(text, at):
        return 6
    behind = text[at + 6 : at + 8]
    return 12 if "\\u".startswith(behind) else 6


def _unescaped(escape: str) -> str:
    if escape[1] != "u":
        return _ESCAPES.get(escape[1], escape[1])
    units = [int(escape[start + 2 : start + 6], 16) for start in range(0, len(escape), 6)]
    if len(units) == 2 and 0xDC00 <= units[1] < 0xE000:
        return chr(0x10000 + ((units[0] - 0xD800) << 10) + units[1] - 0xDC00)
    return "".join(map(chr, units))


def parse_json(text: str) -> JsonValue:
    """Return the value of a generated JSON text. Works at any nesting depth.

    Raises ValueError if the text was cut.
    """
    try:
        return json.loads(text)
    except RecursionError:  # The text is nested more deeply than Python's recursion limit, about 1,000.
        parser = PartialJson()
        parser.push(text)
        parser.finish()
        if not parser.is_complete:
            raise ValueError("the text ends within a value") from None
        return parser.value()
