"""Counts the values in a JSON body before parsing, so that a body with too many values can be refused.

Parsed values take up to thirty times as much memory as their text. A parser also holds the interpreter lock
until all values exist, which stops the event loop.
"""

from collections.abc import Iterator

# A body with the maximum number of tools and message parts, with two fields each, stays below the limit.
MAX_VALUES = 2**18
_PIECE = 2**16  # Bytes that are counted in each step.
# The number of these signs equals the number of values. A comma precedes every value except the first in an
# array or object, for which the opening bracket is counted.
_SIGNS = (b",", b"[", b"{")


def has_too_many_values(body: bytes) -> bool:
    """Whether `body` has more than MAX_VALUES values.

    For a large body, call this function on a thread. The whole count takes long, but the function releases
    the interpreter lock between short steps.
    """
    if len(body) <= MAX_VALUES or _count_at_most(body) <= MAX_VALUES:
        return False
    return count_of_values(body) > MAX_VALUES


def count_of_values(body: bytes) -> int:
    """Count the commas, opening brackets and opening braces outside strings. Stops when the count exceeds
    MAX_VALUES.
    """
    count = 0
    for piece in _outside(body):
        count += sum(map(piece.count, _SIGNS))
        if count > MAX_VALUES:
            break
    return count


def _count_at_most(body: bytes) -> int:
    """Return an upper bound for the count. The bound includes the signs inside strings."""
    count = 0
    for at in range(0, len(body), _PIECE):
        count += sum(body.count(sign, at, at + _PIECE) for sign in _SIGNS)
        if count > MAX_VALUES:
            break
    return count


def _outside(body: bytes) -> Iterator[bytes]:
    """Yield the text of `body` outside strings."""
    at, is_inside = 0, False
    while at < len(body):
        piece = body[at : at + _PIECE]
        if len(piece) > 1 and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # The character that this backslash escapes is in the next piece.
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
