"""Writes character sets for JSON Schema patterns so that the grammar engine and Python agree on their
meaning.
"""

import re
from functools import lru_cache

from mmengine.structured_output.regex.parser import parse_regex
from mmengine.structured_output.regex.sets import Ranges, Set, complement

NEWLINES: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
# Unicode general categories that the grammar engine and Python share.
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
    """Raised for an unsupported pattern. The schema's author sees the message."""


class UnenforceablePattern(PatternError):
    """Raised for a valid pattern that no grammar can enforce, such as a pattern with lookahead."""


def escape_character(point: int) -> str:
    char = chr(point)
    if char.isascii() and char.isalnum() or char == "_" or char == " ":
        return char
    if 0x20 < point < 0x7F:
        return "\\" + char if char in r"\.+*?()|[]{}^$#&-~/" and char != "/" else char
    if point < 0x100:
        return f"\\x{point:02X}"
    return f"\\u{point:04X}" if point < 0x10000 else f"\\U{point:08X}"


def without_nul(ranges: Ranges) -> Ranges:
    r"""Return the set, without U+0000 if the grammar engine would misread the set.

    Some control characters have no short escape such as \n. If a set contains all these characters,
    llguidance 1.9 wrongly adds the quotation mark and the backslash. llguidance reads the set correctly
    without U+0000. `restore_nul` recognizes such a set and adds U+0000 again.
    """
    if _holds(ranges, 0x22) and _holds(ranges, 0x5C) or not _holds_controls(ranges):
        return ranges
    return complement([*complement(ranges), (0, 0)])


def restore_nul(ranges: Ranges, negated: bool) -> Set:
    """Return the characters that a written set stands for. Adds U+0000 if `without_nul` removed U+0000."""
    found = complement(ranges) if negated else complement(complement(ranges))
    if len(set(ranges)) == len(ranges) and _lacks_nul(found):
        found = complement(complement([*found, (0, 0)]))
    return tuple(found)


def _lacks_nul(ranges: Ranges) -> bool:
    more = [*ranges, (0, 0)]
    return not _holds(ranges, 0) and without_nul(more) is not more


@lru_cache(maxsize=256)
def drops_nul(regex: str) -> bool:
    """Return whether `without_nul` removed U+0000 from a set in the pattern."""
    for text in set(_CLASS.findall(regex)):
        plain = _CATEGORY.sub("", text)
        if plain not in ("[]", "[^]") and parse_regex(plain) != parse_regex(plain, meaning=restore_nul):
            return True
    return False


def check_alternatives(sets: list[Ranges]) -> None:
    """Raise PatternError if the union of the sets would need `without_nul`.

    The grammar engine merges alternative sets, and would misread this union.
    """
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


def write_class(ranges: Ranges, extras: str = "", negated: bool = False) -> str:
    if extras and (negated and "\\p{P" in extras or not negated and "\\P{P" in extras):
        raise PatternError("the complement of punctuation cannot be enforced; name the characters instead")
    # A range that is written twice tells `restore_nul` that the set never contained U+0000.
    twice: tuple[int, int] | None = None
    if "\\P" not in extras:
        wanted = complement(ranges) if negated else ranges
        left = without_nul(wanted)
        if left is not wanted:
            ranges = complement(left) if negated else left
            ranges = [(low, high) for low, high in ranges if (low, high) != (0xD800, 0xDFFF)]
        elif ranges and not extras and _lacks_nul(wanted):
            twice = min(ranges)
    written = sorted([*set(ranges), *([twice] if twice else [])])
    inside = "".join(
        escape_character(a) if a == b else f"{escape_character(a)}-{escape_character(b)}" for a, b in written
    )
    return f"[{'^' if negated else ''}{inside}{extras}]"


def is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
