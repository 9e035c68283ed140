"""Parses an ECMA-262 pattern and rewrites each part, as pattern.py describes.

Character sets become explicit ranges, and groups lose their names. Constructs that are not regular are
refused.
"""

import re
from typing import NamedTuple, NoReturn

from mmengine.structured_output.json_schema.patterns.character_sets import (
    ANY,
    CATEGORIES,
    CONTROL,
    NEWLINES,
    PatternError,
    UnenforceablePattern,
    escape_character,
    is_single,
    without_nul,
    write_class,
)
from mmengine.structured_output.regex.sets import DIGIT, LAST, SPACE, WORD, Ranges, complement

MAX_NESTING = 32
MAX_COUNT = 10_000  # Maximum count of a repetition, and maximum product of the counts of nested repetitions.
# A \p stands for hundreds of ranges, and counts as this many copies.
CATEGORY_COST = 50


class Part(NamedTuple):
    """A part of a pattern, rewritten as `text`.

    `fewest`, `most`: minimum and maximum number of matched characters (None: no maximum). `copies`: how often
    counted repetitions copy the part. `times`: (repeated part, minimum count, maximum count) if the part is a
    repetition.
    """

    text: str
    fewest: int = 1
    most: int | None = 1
    copies: int = 1
    literal: str | None = None
    anchor: str = ""
    branches: "list[list[Part]] | None" = None
    times: "tuple[Part, int, int | None] | None" = None


class Parser:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.depth = 0
        # All character sets in the pattern, except \p, which contains no control characters.
        self.sets: list[Ranges] = []
        self.crowded = False  # Whether counted repetitions are nested.

    def fail(self, why: str) -> NoReturn:
        raise PatternError(f"{why} (character {self.at + 1} of the pattern)")

    def refuse(self, what: str) -> NoReturn:
        text = f"{what} cannot be enforced (character {self.at + 1} of the pattern)"
        raise UnenforceablePattern(text)

    def peek(self, ahead: int = 0) -> str:
        return self.text[self.at + ahead : self.at + ahead + 1]

    def take(self, what: str) -> bool:
        if self.text.startswith(what, self.at):
            self.at += len(what)
            return True
        return False

    def branches(self) -> list[list[Part]]:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(f"groups are nested more than {MAX_NESTING} deep")
        out = [self.sequence()]
        while self.take("|"):
            out.append(self.sequence())
        self.depth -= 1
        return out

    def sequence(self) -> list[Part]:
        out = []
        while self.peek() not in ("", "|", ")"):
            out.append(self.quantified(self.atom()))
        return out

    def atom(self) -> Part:
        char = self.peek()
        if char in ("*", "+", "?"):
            self.fail(f"{char} has nothing to repeat")
        self.at += 1
        match char:
            case "^" | "$":
                return Part("", 0, 0, anchor=char)
            case ".":
                return self.class_of(NEWLINES, negated=True)
            case "[":
                return self.bracket()
            case "(":
                return self.group()
            case "\\":
                return self.escape()
        self.sets.append(self.one(char))
        return Part(escape_character(ord(char)), literal=char)

    def class_of(self, ranges: Ranges, extras: str = "", negated: bool = False) -> Part:
        # `write_class` refuses \P for punctuation, so an allowed \P contains control characters, the
        # quotation mark and the backslash.
        if "\\P" in extras:
            self.sets.append([] if negated else [(0, LAST)])
        else:
            self.sets.append(without_nul(complement(ranges) if negated else ranges))
        return Part(write_class(ranges, extras, negated), copies=CATEGORY_COST if extras else 1)

    def group(self) -> Part:
        if self.take("?"):
            if self.peek() in ("=", "!") or self.peek() == "<" and self.peek(1) in ("=", "!"):
                self.refuse("lookahead and lookbehind")
            name = re.compile(r"<[A-Za-z_$][\w$]*>").match(self.text, self.at)
            if name:
                self.at = name.end()
            elif not self.take(":"):
                self.fail("only (…), (?:…) and (?<name>…) groups are supported")
        branches = self.branches()
        if not self.take(")"):
            self.fail("a group is not closed")
        inner = join_branches(branches) if not has_anchor(branches) else Part("", 0, None)
        return inner._replace(text=f"(?:{inner.text})", literal=None, branches=branches)

    def escape(self) -> Part:
        ranges, extras = self.escaped_set()
        if extras:
            return self.class_of([], extras)
        if is_single(ranges):
            self.sets.append(ranges)
            return Part(escape_character(ranges[0][0]), literal=chr(ranges[0][0]))
        return self.class_of(ranges)

    def escaped_set(self, in_class: bool = False) -> tuple[Ranges, str]:
        r"""Return the code point ranges for an escape, and the text if the escape is a \p."""
        char = self.peek()
        self.at += 1
        sets = {"d": DIGIT, "w": WORD, "s": SPACE}
        if char and char in "dws":
            return sets[char], ""
        if char and char in "DWS":
            return complement(sets[char.lower()]), ""
        if char in ("p", "P"):
            found = re.compile(r"\{(?:General_Category=|gc=)?(\w+)\}").match(self.text, self.at)
            if not found or found[1] not in CATEGORIES:
                self.fail("\\p supports only general categories, as in \\p{L}")
            self.at = found.end()
            return [], f"\\{char}{{{found[1]}}}"
        if char == "b" and in_class:
            return [(8, 8)], ""
        if char in ("b", "B"):
            self.refuse("\\b and \\B")
        point = self.escaped_char(char)
        return [(point, point)], ""

    def escaped_char(self, char: str) -> int:
        if char in CONTROL and char and not (char == "0" and self.peek().isdigit()):
            return CONTROL[char]
        if char and char.isdigit() or char == "k":
            self.refuse("back references")
        forms = {
            "x": r"([0-9a-fA-F]{2})",
            "u": r"([0-9a-fA-F]{4})|\{([0-9a-fA-F]{1,6})\}",
            "c": r"([A-Za-z])",
        }
        if char and char in forms:
            found = re.compile(forms[char]).match(self.text, self.at)
            if not found:
                self.fail(f"\\{char} is not complete")
            self.at = found.end()
            if char == "c":
                return ord(found[1]) % 32
            return self.checked_point(int(found[found.lastindex or 1], 16))
        if not char or char.isalnum():
            self.fail(f"\\{char} is not an escape")
        return ord(char)

    def checked_point(self, point: int) -> int:
        if 0xD800 <= point < 0xDC00:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.text, self.at)
            if low:
                self.at = low.end()
                return 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= point <= 0xDFFF or point > LAST:
            self.fail("the escape names half a surrogate pair, or no character")
        return point

    def bracket(self) -> Part:
        negated = self.take("^")
        ranges: Ranges = []
        extras = ""
        while not self.take("]"):
            low, extra = self.bracket_item()
            extras += extra
            if self.peek() == "-" and self.peek(1) not in ("]", ""):
                self.at += 1
                high, extra = self.bracket_item()
                if extra or not (is_single(low) and is_single(high)) or high[0][0] < low[0][0]:
                    self.fail("a character range is out of order")
                low = [(low[0][0], high[0][0])]
            ranges += low
        if not ranges and not extras:
            if not negated:
                self.fail("[] matches nothing")
            return Part(ANY)
        return self.class_of(ranges, extras, negated)

    def bracket_item(self) -> tuple[Ranges, str]:
        char = self.peek()
        if not char:
            self.fail("a [ is not closed")
        self.at += 1
        if char == "\\":
            return self.escaped_set(in_class=True)
        return self.one(char), ""

    def one(self, char: str) -> Ranges:
        if 0xD800 <= ord(char) <= 0xDFFF:
            self.fail("contains half a surrogate pair")
        return [(ord(char), ord(char))]

    def quantified(self, part: Part) -> Part:
        bounds = self.quantifier()
        if bounds is None:
            return part
        if part.anchor or part.branches and has_anchor(part.branches):
            self.fail("an anchor cannot be repeated")
        low, high = bounds
        self.take("?")  # A lazy quantifier matches the same language.
        if self.peek() and self.peek() in "*+?":
            self.fail(f"{self.peek()} has nothing to repeat")
        if part.fewest == 0:
            low = 0  # The part already matches the empty string, so the minimum count makes no difference.
        if part.copies * max(low, high or 1) > MAX_COUNT:
            counts = f"counted repetitions copy more than {MAX_COUNT:,} times"
            self.fail(
                f"{counts} (a \\p counts as {CATEGORY_COST}); lower them, or name narrower classes as [a-z]"
            )
        self.crowded |= part.copies > 1 and max(low, high or 1) > 1
        return repeat(part, low, high)

    def quantifier(self) -> tuple[int, int | None] | None:
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(char):
                return bounds
        found = re.compile(r"\{(\d{1,6})(?:(,)(\d{0,6}))?\}").match(self.text, self.at)
        if not found:
            if re.compile(r"\{\d+(,\d*)?\}").match(self.text, self.at):
                self.fail(f"it repeats more than {MAX_COUNT:,} times")
            return None
        self.at = found.end()
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if high is not None and high < low:
            self.fail("a repetition's minimum exceeds its maximum")
        return low, high


def has_anchor(branches: list[list[Part]]) -> bool:
    return any(
        part.anchor or part.branches and has_anchor(part.branches) for parts in branches for part in parts
    )


def repeat(part: Part, low: int, high: int | None) -> Part:
    text = part.text
    if not (part.literal and len(part.literal) == 1 or text.startswith(("(", "[", "\\p", "\\P"))):
        text = f"(?:{text})"
    counts = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
    suffix = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((low, high), counts)
    most = 0 if part.most == 0 else None if part.most is None or high is None else part.most * high
    copies = part.copies * max(low, high or 1)
    return Part(text + suffix, part.fewest * low, most, copies, times=(part, low, high))


def join_branches(branches: list[list[Part]]) -> Part:
    """Return the alternatives as a single part."""
    text = "|".join("".join(part.text for part in parts) for parts in branches)
    most: int | None = 0
    for parts in branches:
        widths = [part.most for part in parts]
        known = [width for width in widths if width is not None]
        most = None if most is None or len(known) < len(widths) else max(most, sum(known))
    fewest = min(sum(part.fewest for part in parts) for parts in branches)
    copies = max([1, *(part.copies for parts in branches for part in parts)])
    literal = None
    if len(branches) == 1 and all(part.literal is not None for part in branches[0]):
        literal = "".join(part.literal or "" for part in branches[0])
    return Part(text, fewest, most, copies, literal)
