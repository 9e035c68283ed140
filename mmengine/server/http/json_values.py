"""How many values a body of JSON has, counted before it is parsed: as objects they take up to thirty times
its bytes, and a parser keeps the interpreter, and so the event loop, until it has made all of them."""

from collections.abc import Iterator

MAX_VALUES = 2**18  # of one body: all parts that messages may have, each with two fields, and tools
_PIECE = 2**16  # bytes that are looked at at once
_SIGNS = (b",", b"[", b"{")  # one at each value, but for the first ones of lists and objects


def has_too_many_values(body: bytes) -> bool:
    """Whether it has more than MAX_VALUES. On a thread, where it is large: all of it takes long, no part of
    it does."""
    if len(body) <= MAX_VALUES or _count_at_most(body) <= MAX_VALUES:
        return False
    return count_of_values(body) > MAX_VALUES


def count_of_values(body: bytes) -> int:
    """Commas, brackets and braces outside of strings; behind MAX_VALUES of them the rest is not counted."""
    count = 0
    for piece in _outside(body):
        count += sum(map(piece.count, _SIGNS))
        if count > MAX_VALUES:
            break
    return count


def _count_at_most(body: bytes) -> int:
    """The same, with those in strings."""
    count = 0
    for at in range(0, len(body), _PIECE):
        count += sum(body.count(sign, at, at + _PIECE) for sign in _SIGNS)
        if count > MAX_VALUES:
            break
    return count


def _outside(body: bytes) -> Iterator[bytes]:
    """What stands outside of strings."""
    at, is_inside = 0, False
    while at < len(body):
        piece = body[at : at + _PIECE]
        if len(piece) > 1 and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # what this backslash stands before is in the next piece
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
