"""Removes token id lists from a body before the body is parsed.

Parsing a long list would hold the GIL and stop the event loop. Therefore an unguessable number replaces the
list in the body, and the list is decoded in chunks, to 4 bytes per id.
"""

import re
import secrets
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mmengine.server.http.media_payloads import find

MIN_BYTES = 2**15  # Shorter lists stay in the body.
MAX_LISTS = 4096  # Maximum number of inner lists, each a prompt.
_PIECE = 2**15  # Approximate number of bytes in a chunk.
_MAX_HEAD = 128  # Maximum distance from a field's name to its value in bytes.
_MAX_PLACES = 64  # Maximum number of occurrences of the field's name that are examined.
_SIGNS = b"-0123456789,[] \t\r\n"  # Characters that lists of integers may contain.
_BEGIN = re.compile(rb"\s*(,?)\s*\[")
_VALUE = re.compile(rb"\s*:\s*\[")
_OTHER = re.compile(b"[^%b]" % re.escape(_SIGNS))
_decode = msgspec.json.Decoder(list[int]).decode


class TokenIds(NamedTuple):
    """The token id lists that were removed from a body. `stands`: a list with a single number, which replaces
    the removed lists in the body.
    """

    lists: Sequence[Sequence[int]]
    stands: list[int]


NO_IDS = TokenIds((), [])


def take_out(body: bytes, field: bytes, *, may_nest: bool = False) -> tuple[bytes, TokenIds]:
    """Remove the long integer list in `field`, and return the body and the list.

    `may_nest`: whether the value may be a list of lists. Integers that do not fit in 32 bits are no valid
    token ids, and become -1. Call this function on a worker thread; it releases the GIL between chunks.
    """
    at, name = 0, b'"%b"' % field
    for _ in range(_MAX_PLACES if len(body) > MIN_BYTES else 0):
        if (key := find(body, name, at)) < 0:
            break
        at = key + len(name)
        value = _VALUE.match(body, at, at + _MAX_HEAD)
        if value is None or body[key - 1 : key] == b"\\":
            continue
        start, end = value.end(), _end(body, value.end())
        if end - start < MIN_BYTES:
            continue
        is_nested = may_nest and body[start : start + _MAX_HEAD].lstrip()[:1] == b"["
        try:
            lists = _nested(body, start, end) if is_nested else [_ids(body, start, end)]
        # The value is not a list of integers. It stays in the body, so that the reader reports the error.
        except ValueError:
            break
        stands = secrets.randbits(62)
        return b"%b%d%b" % (body[:start], stands, body[end:]), TokenIds(lists, [stands])
    return body, NO_IDS


def _end(body: bytes, start: int) -> int:
    """Return the position of the last "]" between `start` and the first character that cannot be in an
    integer list. Returns `start` if there is no "]" in this range.
    """
    end = start
    while end < len(body) and not body[end : end + _PIECE].translate(None, _SIGNS):
        end += _PIECE
    other = _OTHER.search(body, end, end + _PIECE)
    return max(start, body.rfind(b"]", start, len(body) if other is None else other.start()))


def _nested(body: bytes, at: int, end: int) -> "list[array[int]]":
    """Return a nested list's inner lists. Raises ValueError."""
    lists: list[array[int]] = []
    while (close := find(body, b"]", at, end)) >= 0 and len(lists) < MAX_LISTS:
        begun = _BEGIN.match(body, at, close)
        if begun is None or bool(begun[1]) != bool(lists):
            raise ValueError
        lists.append(_ids(body, begun.end(), close))
        at = close + 1
    if body[at:end].strip():
        raise ValueError
    return lists


def _ids(body: bytes, at: int, end: int) -> "array[int]":
    """Return the integers in a list's text without its brackets. Raises ValueError."""
    found = array("i")
    while at < end:
        comma = body.find(b",", at + _PIECE, end)
        piece = body[at : end if comma < 0 else comma]
        try:
            ids = _decode(b"[%b]" % piece)
        except msgspec.DecodeError as error:
            raise ValueError from error
        try:
            found.extend(array("i", ids))
        except OverflowError:
            found.extend(each if abs(each) < 2**31 else -1 for each in ids)
        at = end if comma < 0 else comma + 1
        if comma >= 0 and not body[at : min(end, at + _PIECE)].strip():
            raise ValueError  # A trailing comma.
    return found
