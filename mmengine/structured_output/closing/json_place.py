"""Where in a JSON text its end is: how deep, and within which string."""

from typing import NamedTuple

NOTHING = 0  # what was said last, before anything was
KEY = 1  # a key, up to its quotation mark
MAX_KNOWN = 1024  # bytes of a string that are kept
_UNKNOWN = b"\xff"  # in place of a longer one: the beginning of no text
_SPACE = frozenset(b" \t\r\n")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


class Place(NamedTuple):
    """`inside`: the brackets that are open, the outermost first; `last`: the last byte outside of strings
    that is no white space, or KEY, or a quotation mark behind another string; `string`: what was said of the
    string that the end is in, as it is spelled; `escaped`: whether a lone backslash ends that. `call`: what
    was said of the last call of a tool, None before the first; `tail`: the last bytes of the text.

    Of a text that is no JSON it says something, too, which means nothing."""

    inside: bytes = b""
    last: int = NOTHING
    string: bytes | None = None
    escaped: bool = False
    # Of a text with calls of tools alone:
    call: bytes | None = None
    tail: bytes = b""

    @property
    def wants_key(self) -> bool:
        """Whether a key may begin, or is going on."""
        return self.inside.endswith(b"{") and self.last in b"{,"

    @property
    def wants_value(self) -> bool:
        return self.last in b":" or self.last in b"[," and not self.wants_key or self.last == NOTHING

    @property
    def bracket(self) -> bytes:
        """That which closes the innermost part; b"" outside of all."""
        return {b"{": b"}", b"[": b"]"}.get(self.inside[-1:], b"")

    def said_bare(self, text: bytes) -> "Place":
        """The place behind `text` in one that is no JSON: all of it is `string`."""
        string = (self.string or b"") + text
        return Place(string=string if len(string) <= MAX_KNOWN else _UNKNOWN * (MAX_KNOWN + 1))

    def advance(self, text: bytes) -> "Place":
        """The place behind `text`, which begins here."""
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
        return Place(inside, last, string, escaped)
