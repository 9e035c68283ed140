"""Lists of token ids in a body, taken out of it before it is parsed: they are read piece by piece, and take
four bytes each. A number that nobody can guess stays in their place."""

import re
import secrets
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mmengine.server.http.media_payloads import find

MIN_BYTES = 2**15  # of lists that are taken out
MAX_LISTS = 4096  # prompts of one body
_PIECE = 2**15  # bytes that are read at once
_MAX_HEAD = 128  # bytes from a field's name to its value
_MAX_PLACES = 64  # of the name that are looked at
_SIGNS = b"-0123456789,[] \t\r\n"  # of lists of integers
_BEGIN = re.compile(rb"\s*(,?)\s*\[")
_VALUE = re.compile(rb"\s*:\s*\[")
_OTHER = re.compile(b"[^%b]" % re.escape(_SIGNS))
_decode = msgspec.json.Decoder(list[int]).decode


class TokenIds(NamedTuple):
    """`lists`: none where nothing was taken out. `stands`: what the body has in their place."""

    lists: Sequence[Sequence[int]]
    stands: list[int]


NO_IDS = TokenIds((), [])


def take_out(body: bytes, field: bytes, *, may_nest: bool = False) -> tuple[bytes, TokenIds]:
    """The body without a long list of integers, or a list of such lists where it `may_nest`, that is the
    value of `field`, and these. Integers beyond 32 bits become -1, which is no token either. On a thread: all
    of it takes long, no part of it does."""
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
        except ValueError:  # of no list of integers: it stays, for whoever says what is wrong with it
            break
        stands = secrets.randbits(62)
        return b"%b%d%b" % (body[:start], stands, body[end:]), TokenIds(lists, [stands])
    return body, NO_IDS


def _end(body: bytes, start: int) -> int:
    """Of what may stand in lists of integers, the place of the last bracket."""
    end = start
    while end < len(body) and not body[end : end + _PIECE].translate(None, _SIGNS):
        end += _PIECE
    other = _OTHER.search(body, end, end + _PIECE)
    return max(start, body.rfind(b"]", start, len(body) if other is None else other.start()))


def _nested(body: bytes, at: int, end: int) -> "list[array[int]]":
    """Raises ValueError."""
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
    """Raises ValueError."""
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
            raise ValueError  # a comma behind which nothing comes
    return found
