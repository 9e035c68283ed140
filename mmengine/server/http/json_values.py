"""Counts the values in a JSON body before parsing, to refuse a body with too many values.

Parsed values need up to 30 times the memory of their text. A parser also holds the GIL until the whole body
is parsed, so the event loop waits.
"""

from collections.abc import Iterator

# The limit admits the maximum number of tools and message parts, with two fields each.
MAX_VALUES = 2**18
_PIECE = 2**16  # Bytes per step.
# Signs to count. In an array or object, the opening bracket stands for the first value, and a comma precedes
# each further value.
_SIGNS = (b",", b"[", b"{")


def has_too_many_values(body: bytes) -> bool:
    """Whether `body` has more than MAX_VALUES values.

    Call this function on a thread for a large body. Each step is short, so other threads can run between the
    steps.
    """
    if len(body) <= MAX_VALUES or _count_at_most(body) <= MAX_VALUES:
        return False
    return count_of_values(body) > MAX_VALUES


def count_of_values(body: bytes) -> int:
    """Count the commas, opening brackets and opening braces outside strings, and stop above MAX_VALUES."""
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
    """Yield the text of `body` outside strings."""
    at, is_inside = 0, False
    while at < len(body):
        piece = body[at : at + _PIECE]
        if len(piece) > 1 and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # The escaped character is in the next piece.
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
