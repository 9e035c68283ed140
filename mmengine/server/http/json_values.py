"""Counts the values in a JSON body before the body is parsed.

Parsed values take up to thirty times their text's bytes. A parser also holds the interpreter lock until all
values exist, which stops the event loop.
"""

from collections.abc import Iterator

# Enough for a body with the maximum number of tools and of message parts with two fields each.
MAX_VALUES = 2**18
_PIECE = 2**16  # Bytes in each step.
# Counts the values: a comma precedes every value except its container's first, for which the bracket counts.
_SIGNS = (b",", b"[", b"{")


def has_too_many_values(body: bytes) -> bool:
    """Whether `body` has more than MAX_VALUES values.

    For a large body, call this on a thread: the whole count takes long, but the interpreter lock is released
    between short steps.
    """
    if len(body) <= MAX_VALUES or _count_at_most(body) <= MAX_VALUES:
        return False
    return count_of_values(body) > MAX_VALUES


def count_of_values(body: bytes) -> int:
    """Count the commas, opening brackets and opening braces outside strings. Stops once the count exceeds
    MAX_VALUES.
    """
    count = 0
    for piece in _outside(body):
        count += sum(map(piece.count, _SIGNS))
        if count > MAX_VALUES:
            break
    return count


def _count_at_most(body: bytes) -> int:
    """Return an upper bound for the count, which includes the signs inside strings."""
    count = 0
    for at in range(0, len(body), _PIECE):
        count += sum(body.count(sign, at, at + _PIECE) for sign in _SIGNS)
        if count > MAX_VALUES:
            break
    return count


def _outside(body: bytes) -> Iterator[bytes]:
    """Yield the text outside strings."""
    at, is_inside = 0, False
    while at < len(body):
        piece = body[at : at + _PIECE]
        if len(piece) > 1 and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # The character that this backslash escapes is in the next piece.
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
