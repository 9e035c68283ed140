"""Track the position in a JSON text: its open brackets, and the current string."""

from typing import NamedTuple

NO_BYTE = 0  # The value of `last` before any byte.
KEY = 1  # The value of `last` after a key.
MAX_KNOWN = 1024  # Maximum number of bytes of a string that are kept.
_UNKNOWN = b"\xff"  # Replaces the bytes of a longer string; no UTF-8 text contains this byte.
_SPACE = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class Position(NamedTuple):
    """A position in a JSON text.

    `inside` holds the open brackets, the outermost first. `last` is the last byte outside of strings that is
    not white space; it is KEY after a key, and a quotation mark after another string. `string` is the current
    string so far, as spelled. `escaped` says whether `string` ends with a lone backslash. `call` is the text
    of the last tool call so far, None before the first call. `tail` holds the text's last bytes.

    The fields have no meaning for a text that is not JSON.
    """

    inside: bytes = b""
    last: int = NO_BYTE
    string: bytes | None = None
    escaped: bool = False
    # Only for a text with tool calls:
    call: bytes | None = None
    tail: bytes = b""

    @property
    def wants_key(self) -> bool:
        """Return whether a key may begin or is being written."""
        return self.inside.endswith(b"{") and self.last in b"{,"

    @property
    def wants_value(self) -> bool:
        return self.last in b":" or self.last in b"[," and not self.wants_key or self.last == NO_BYTE

    @property
    def bracket(self) -> bytes:
        """Return the bracket that closes the innermost part; b"" outside of all parts."""
        return {b"{": b"}", b"[": b"]"}.get(self.inside[-1:], b"")

    def advance_bare(self, text: bytes) -> "Position":
        """Return the position after `text` in a text that is not JSON, whose `string` is the whole text."""
        string = (self.string or b"") + text
        return Position(string=string if len(string) <= MAX_KNOWN else _UNKNOWN * (MAX_KNOWN + 1))

    def advance(self, text: bytes) -> "Position":
        """Return the position after `text`, which begins here."""
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
