"""Sets of characters, and how they are written so that the grammar engine and Python read them alike."""

import re
from functools import lru_cache

from mmengine.structured_output.regex.read import read_regex
from mmengine.structured_output.regex.sets import Ranges, Set, complement

NEWLINES: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
# General categories that both engines name alike.
CATEGORIES = frozenset(
    [
        *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No"),
        *("P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp"),
        *("Letter", "Uppercase_Letter", "Lowercase_Letter", "Number", "Decimal_Number"),
        *("Punctuation", "Symbol", "Separator", "Mark"),
    ]
)
ANY = "(?s:.)"
_CLASS = re.compile(r"\[(?:[^\]\\]|\\.)*\]", re.DOTALL)
_CATEGORY = re.compile(r"\\[pP]\{\w+\}")


class PatternError(ValueError):
    """What is wrong with a pattern, for the person who wrote it."""


def escaped(point: int) -> str:
    char = chr(point)
    if char.isascii() and char.isalnum() or char == "_" or char == " ":
        return char
    if 0x20 < point < 0x7F:
        return "\\" + char if char in r"\.+*?()|[]{}^$#&-~/" and char != "/" else char
    if point < 0x100:
        return f"\\x{point:02X}"
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def without_nul(ranges: Ranges) -> Ranges:
    """The set without U+0000 where the grammar engine would add to it.

    Of a set of all control characters (but those with an escape of their own, as \\n) llguidance 1.9 takes
    it that it holds the quote and the backslash too. A set that lacks one of them gives up U+0000. That it
    means it all the same is told from its text: `meant`.
    """
    if _holds(ranges, 0x22) and _holds(ranges, 0x5C) or not _holds_controls(ranges):
        return ranges
    return complement([*complement(ranges), (0, 0)])


def meant(ranges: Ranges, negated: bool) -> Set:
    """What a set stands for that is written so: with the U+0000 that it gave up."""
    found = complement(ranges) if negated else complement(complement(ranges))
    if len(set(ranges)) == len(ranges) and _seems_to_give_up(found):
        found = complement(complement([*found, (0, 0)]))
    return tuple(found)


def _seems_to_give_up(ranges: Ranges) -> bool:
    more = [*ranges, (0, 0)]
    return not _holds(ranges, 0) and without_nul(more) is not more


@lru_cache(maxsize=256)
def gives_up_nul(regex: str) -> bool:
    """Whether a set of a pattern stands for U+0000 and is written without it."""
    for text in set(_CLASS.findall(regex)):
        plain = _CATEGORY.sub("", text)
        if plain not in ("[]", "[^]") and read_regex(plain) != read_regex(plain, meaning=meant):
            return True
    return False


def check_alternatives(sets: list[Ranges]) -> None:
    """Refuse sets of one pattern that, made one set of, would be added to as `without_nul` says: the grammar
    engine makes one of those that are alternatives."""
    for mark in (0x22, 0x5C):
        without = [each for ranges in sets if not _holds(ranges, mark) for each in ranges]
        if _holds_controls(without):
            raise PatternError(
                "U+0000, beside all other control characters, cannot be told from the quote or backslash; "
                "leave it out"
            )


def _holds(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _holds_controls(ranges: Ranges) -> bool:
    return all(_holds(ranges, point) for point in range(32) if point not in (8, 9, 10, 12, 13))


def char_class(ranges: Ranges, extras: str = "", negated: bool = False) -> str:
    if extras and (negated and "\\p{P" in extras or not negated and "\\P{P" in extras):
        raise PatternError("the complement of punctuation cannot be enforced; name the characters instead")
    twice: tuple[int, int] | None = None  # says that it was without U+0000 to begin with
    if "\\P" not in extras:
        wanted = complement(ranges) if negated else ranges
        left = without_nul(wanted)
        if left is not wanted:
            ranges = complement(left) if negated else left
            ranges = [(low, high) for low, high in ranges if (low, high) != (0xD800, 0xDFFF)]
        elif ranges and not extras and _seems_to_give_up(wanted):
            twice = min(ranges)
    written = sorted([*set(ranges), *([twice] if twice else [])])
    inside = "".join(escaped(a) if a == b else f"{escaped(a)}-{escaped(b)}" for a, b in written)
    return f"[{'^' if negated else ''}{inside}{extras}]"


def single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
