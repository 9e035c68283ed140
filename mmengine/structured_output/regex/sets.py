"""Character sets as code point ranges, and operations on them. No set contains surrogates, since no text
contains surrogates.
"""

from bisect import bisect_right
from collections.abc import Iterable

LAST = 0x10FFFF

Ranges = list[tuple[int, int]]  # Inclusive code point ranges, in any order.
Set = tuple[tuple[int, int], ...]  # Inclusive code point ranges, sorted and without overlaps.
DIGIT: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACE: Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the complement, sorted and without overlaps."""
    out, start = [], 0
    for low, high in sorted([*ranges, (0xD800, 0xDFFF)]):
        if low > start:
            out.append((start, low - 1))
        start = max(start, high + 1)
    if start <= LAST:
        out.append((start, LAST))
    return out


def set_of(ranges: Iterable[tuple[int, int]]) -> Set:
    return tuple(complement(complement(ranges)))


def contains(one: Set, point: int) -> bool:
    at = bisect_right(one, (point, LAST))
    return at > 0 and one[at - 1][1] >= point


def have_common(one: Set, other: Set) -> bool:
    """Return whether some character is in both sets."""
    at = 0
    for low, high in one:
        while at < len(other) and other[at][1] < low:
            at += 1
        if at < len(other) and other[at][0] <= high:
            return True
    return False
