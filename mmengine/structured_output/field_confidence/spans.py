"""Finds the values in a JSON text, with their JSON pointers and their positions in bytes."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

Path = tuple[str | int, ...]

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ATOM = re.compile(rb"[^ \t\r\n,:\[\]{}\"]+")
_CLOSED_BY = {b"{": b"}", b"[": b"]"}
# Maximum length of a path. Without this limit, the paths' total length could grow with the square of the
# answer's length.
MAX_DEPTH = 64


class Span(NamedTuple):
    """A scalar, or an empty array or object, at `path`. `start`, `end`: byte positions in the text."""

    path: Path
    start: int
    end: int


def value_spans(text: bytes) -> Iterator[Span]:
    """Yield the complete scalars and the empty arrays and objects in a JSON text, in order. Values deeper
    than MAX_DEPTH are left out.

    The text may be truncated, or continue after the value. Inside an array or object, a number or literal at
    the text's end counts as incomplete.
    """
    # Open containers: the closing bracket, and the key or index of the current value.
    containers: list[tuple[bytes, str | int]] = []
    at = _skip(text, 0)
    while at < len(text):
        byte = text[at : at + 1]
        if containers and byte == containers[-1][0]:
            containers.pop()
            at = _skip(text, at + 1)
        elif containers and byte == b",":
            closing, place = containers[-1]
            containers[-1] = closing, place + 1 if isinstance(place, int) else place
            at = _skip(text, at + 1)
        else:
            if containers and containers[-1][0] == b"}":
                key = _STRING.match(text, at)
                colon = None if key is None else _skip(text, key.end())
                if key is None or text[colon : _after(colon)] != b":":
                    return
                containers[-1] = b"}", json.loads(key.group())
                at = _skip(text, _after(colon))
                byte = text[at : at + 1]
            if byte in _CLOSED_BY:
                end = _skip(text, at + 1)
                if text[end : end + 1] != _CLOSED_BY[byte]:
                    containers.append((_CLOSED_BY[byte], "" if byte == b"{" else 0))
                    at = end
                    continue
                end += 1
            else:
                found = _STRING.match(text, at) or _ATOM.match(text, at)
                if found is None or (found.end() == len(text) and containers and byte != b'"'):
                    return
                end = found.end()
            if len(containers) <= MAX_DEPTH:
                yield Span(tuple(place for _, place in containers), at, end)
            at = _skip(text, end)
        if not containers:
            return


def _skip(text: bytes, at: int) -> int:
    """Return the position after the white space at `at`."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _after(place: int | None) -> int:
    return 0 if place is None else place + 1
