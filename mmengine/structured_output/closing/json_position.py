"""Tracks the position in a JSON text: the open brackets, and the current string."""

from typing import NamedTuple

NO_BYTE = 0  # `last` before any byte.
KEY = 1  # `last` after a key.
MAX_KNOWN = 1024  # Maximum number of a string's bytes that are kept.
_UNKNOWN = b"\xff"  # Replaces the bytes of a longer string; no UTF-8 text contains this byte.
_SPACE = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class Position(NamedTuple):
    """A position in a JSON text.

    `inside` has the open brackets, outermost first. `last` is the last non-space byte outside strings: KEY
    after a key, a quotation mark after another string. `string` is the JSON spelling of the current string so
    far. `escaped` says whether `string` ends with a backslash that escapes the next character. `call` is the
    last tool call's text so far; None before the first call. `tail` has the text's last bytes.

    The fields have no meaning for a text that is not JSON.
    """

    inside: bytes = b""
    last: int = NO_BYTE
    string: bytes | None = None
    escaped: bool = False
    # The fields below are used only for a text with tool calls.
    call: bytes | None = None
    tail: bytes = b""

    @property
    def wants_key(self) -> bool:
        """Whether the position is inside a key, or a key may begin here."""
        return self.inside.endswith(b"{") and self.last in b"{,"

    @property
    def wants_value(self) -> bool:
        return self.last in b":" or self.last in b"[," and not self.wants_key or self.last == NO_BYTE

    @property
    def bracket(self) -> bytes:
        """The bracket that closes the innermost list or object; b"" outside of all brackets."""
        return {b"{": b"}", b"[": b"]"}.get(self.inside[-1:], b"")

    def advance_bare(self, text: bytes) -> "Position":
        """Return the position after `text` in an answer that is not JSON. `string` is the answer so far."""
        string = (self.string or b"") + text
        return Position(string=string if len(string) <= MAX_KNOWN else _UNKNOWN * (MAX_KNOWN + 1))

    def advance(self, text: bytes) -> "Position":
        """Return the position after `text`, which begins at this position."""
        inside, last, string, escaped = self[:4]
        for byte in text:
            if string is not None:
                if byte == _QUOTE and not escaped:
                    last = KEY if inside.endswith(b"{") and last in b"{," else _QUOTE
                    string = None
                else:
                    escaped = byte == _BACKSLASH and not escaped
                    string = string + bytes((byte,)) if len(string) < MAX_KNOWN else _UNKNOWN * MAX_KNOWN
            elif byte == _QUOTE:
                string = b""
            elif byte not in _SPACE:
                last = byte
                if byte in b"{[":
                    inside += bytes((byte,))
                elif byte in b"}]":
                    inside = inside[:-1]
        return Position(inside, last, string, escaped)
