"""Writes number ranges and multiples as EBNF: an automaton over digits, with a rule per state.

A state has a position, a remainder modulo the multiple, and two flags. The position is the number of
remaining integer digits, or the number of decimal places so far. The flags say whether the digits so far
equal the lower and the upper bound's digits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from mmengine.structured_output.json_schema.vocabulary.keywords import count_decimals
from mmengine_xgrammar.rules import EMPTY, Rules, char_set

MAX_MODULUS = 100  # Maximum number of remainders modulo the multiple.


class NumberRefused(ValueError):
    """Raised for a multiple that would need too many states."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers. `low` or `high` None means no bound. `multiple`: 0 for any number. `most`: if a
    bound is missing, the maximum number of digits on each side of the point; 0 for no maximum.
    """

    low: Fraction | None
    low_exclusive: bool
    high: Fraction | None
    high_exclusive: bool
    multiple: Fraction
    most: int = 0


def write_number(is_whole: bool, most: int) -> str:
    """Return an expression for all numbers. `most`: as in Range."""
    more = f"{{0,{most - 1}}}" if most else "*"
    integer = f'"-"? ("0" | [1-9] [0-9]{more})'
    if is_whole:
        return integer
    digits = f"[0-9]{{1,{most}}}" if most else "[0-9]+"
    return f'{integer} ("." {digits})? ([eE] [+\\-]? {digits})?'


def write_range(wanted: Range, rules: Rules) -> str | None:
    """Return an expression for the numbers of a range, without exponents, or None if the range is empty."""
    ways = []
    most = 0 if wanted.low is not None and wanted.high is not None else wanted.most
    if wanted.high is None or wanted.high >= 0:
        low = (
            (wanted.low, wanted.low_exclusive)
            if wanted.low is not None and wanted.low >= 0
            else (None, False)
        )
        ways.append(_digits(low, (wanted.high, wanted.high_exclusive), wanted.multiple, rules, most))
    if wanted.low is None or wanted.low < 0:
        far = (None if wanted.low is None else -wanted.low, wanted.low_exclusive)
        below = wanted.high is not None and wanted.high < 0
        near = (-wanted.high, wanted.high_exclusive) if below else (Fraction(0), True)  # type: ignore[operator]
        negative = _digits(near, far, wanted.multiple, rules, most)
        ways.append(None if negative is None else f'"-" {negative}')
    found = [way for way in ways if way is not None]
    return rules.add(" | ".join(found)) if found else None


def _digits(
    low: tuple[Fraction | None, bool],
    high: tuple[Fraction | None, bool],
    multiple: Fraction,
    rules: Rules,
    most: int,
) -> str | None:
    least = _Bound(low[0] or Fraction(0), not low[1])
    end = None if high[0] is None else _Bound(high[0], not high[1])
    return _Automaton(least, end, multiple, rules, most).whole()


class _Bound:
    """The digits of a non-negative bound."""

    def __init__(self, value: Fraction, inclusive: bool):
        places = count_decimals(value)
        text = str(int(value * 10**places)).rjust(places + 1, "0")
        self.integer, self.behind = text[: len(text) - places], text[len(text) - places :]
        self.inclusive = inclusive

    def digit(self, depth: int) -> int:
        return int(self.behind[depth]) if depth < len(self.behind) else 0

    def is_reached(self, depth: int) -> bool:
        """Return whether all remaining digits of the bound are 0."""
        return not self.behind[depth:].strip("0")


@dataclass(slots=True)
class _Automaton:
    low: _Bound
    high: _Bound | None
    multiple: Fraction
    rules: Rules
    most: int = 0  # Maximum number of digits in each part; 0 for no maximum.
    known: dict[tuple, str | None] = field(default_factory=dict)
    places: int | None = None  # Maximum number of decimal places.
    modulus: int = 1

    def __post_init__(self) -> None:
        if self.multiple:
            self.places = count_decimals(self.multiple)
            self.modulus = int(self.multiple * 10**self.places)
        if self.modulus > MAX_MODULUS:
            raise NumberRefused(f"a multiple of more than {MAX_MODULUS} units of its last digit")

    def whole(self) -> str | None:
        fewest = len(self.low.integer)
        most = fewest if self.high is None else len(self.high.integer)
        ways = []
        for length in range(fewest, most + 1):
            tight = (length == fewest, self.high is not None and length == most)
            ways.append(
                self._choice(lambda d, rest: self._integer(rest, *d), length - 1, *tight, 0, length > 1)
            )
        if self.high is None:
            ways.append(self._choice(lambda d, rest: self._more(rest, d[2]), fewest, False, False, 0, True))
        found = [way for way in ways if way is not None]
        return self.rules.add(" | ".join(found)) if found else None

    def _state(self, key: tuple, make: Callable[[], str | None]) -> str | None:
        if key not in self.known:
            self.known[key] = None
            body = make()
            self.known[key] = None if body is None else self.rules.add(body)
        return self.known[key]

    def _choice(
        self,
        follow: Callable[[tuple[bool, bool, int], int], str | None],
        rest: int,
        tight_low: bool,
        tight_high: bool,
        remainder: int,
        leads: bool,
    ) -> str | None:
        """Return an expression for an integer digit and the remaining text."""
        at = -1 - rest
        ways: dict[str, list[int]] = {}
        for digit in range(1 if leads else 0, 10):
            least = int(self.low.integer[at]) if tight_low else -1
            most = int(self.high.integer[at]) if tight_high and self.high else 10
            if least <= digit <= most:
                left = (remainder * 10 + digit) % self.modulus
                rule = follow((tight_low and digit == least, tight_high and digit == most, left), rest)
                if rule is not None:
                    ways.setdefault(rule, []).append(digit)
        return _join(ways)

    def _integer(self, rest: int, tight_low: bool, tight_high: bool, remainder: int) -> str | None:
        """Return an expression for `rest` more integer digits and the remaining text."""
        if not rest:
            return self._behind(0, tight_low, tight_high, remainder)
        if not tight_low and not tight_high and self.modulus == 1:
            return self.rules.add(f"[0-9]{{{rest}}} {self._behind(0, False, False, 0)}")
        return self._state(
            (rest, tight_low, tight_high, remainder),
            lambda: self._choice(
                lambda d, left: self._integer(left, *d), rest - 1, tight_low, tight_high, remainder, False
            ),
        )

    def _more(self, rest: int, remainder: int) -> str | None:
        """Return an expression for at least `rest` more integer digits, without an upper bound."""
        if self.modulus == 1:
            # If the lower bound has `most` or more digits, the number of digits has no maximum.
            most = self.most - 1 if self.most > rest else ""
            return self.rules.add(f"[0-9]{{{rest},{most}}} {self._behind(0, False, False, 0)}")
        if rest:
            return self._state(
                ("more", rest, remainder),
                lambda: self._choice(
                    lambda d, left: self._more(left, d[2]), rest - 1, False, False, remainder, False
                ),
            )
        if ("more", 0, remainder) not in self.known:
            name = self.known["more", 0, remainder] = self.rules.reserve()
            digits = self._choice(lambda d, left: self._more(0, d[2]), 0, False, False, remainder, False)
            end = self._behind(0, False, False, remainder)
            self.rules.give(name, " | ".join(way for way in (end, digits) if way is not None))
        return self.known["more", 0, remainder]

    def _behind(self, depth: int, tight_low: bool, tight_high: bool, remainder: int) -> str | None:
        """Return an expression for the text after `depth` decimal places."""
        return self._state(
            ("behind", depth, tight_low, tight_high, remainder),
            lambda: self._fraction(depth, tight_low, tight_high, remainder),
        )

    def _fraction(self, depth: int, tight_low: bool, tight_high: bool, remainder: int) -> str | None:
        ways = [EMPTY] if self._is_number(depth, tight_low, tight_high, remainder) else []
        digits = None
        if self.places is None or depth < self.places:
            digits = self._next(depth, tight_low, tight_high, remainder)
        if digits is not None:
            ways.append(f'"." {digits}' if not depth else digits)
        return " | ".join(ways) or None

    def _is_number(self, depth: int, tight_low: bool, tight_high: bool, remainder: int) -> bool:
        if tight_low and not (self.low.is_reached(depth) and self.low.inclusive):
            return False
        if tight_high and self.high and self.high.is_reached(depth) and not self.high.inclusive:
            return False
        return self.places is None or remainder * 10 ** (self.places - depth) % self.modulus == 0

    def _next(self, depth: int, tight_low: bool, tight_high: bool, remainder: int) -> str | None:
        """Return an expression for a decimal place and the remaining text."""
        if self.modulus == 1 and not tight_low and not tight_high:
            return f"[0-9]{{1,{self.places - depth}}}" if self.places else self._digits_behind(depth)
        if self.places is None and self._is_past(depth):
            if tight_high:
                zeros = f'"0"{{1,{max(1, self.most - depth)}}}' if self.most else '"0"+'
                return zeros if self._is_number(depth, tight_low, tight_high, remainder) else None
            if self.low.inclusive:
                return self._digits_behind(depth)
            if not self.most:
                return '"0"* [1-9] [0-9]*'
            left = max(0, self.most - depth - 1)
            return f'"0"{{0,{left // 2}}} [1-9] [0-9]{{0,{left - left // 2}}}'
        ways: dict[str, list[int]] = {}
        for digit in range(10):
            least = self.low.digit(depth) if tight_low else -1
            most = self.high.digit(depth) if tight_high and self.high else 10
            if least <= digit <= most:
                left = (remainder * 10 + digit) % self.modulus
                rule = self._behind(
                    depth + 1, tight_low and digit == least, tight_high and digit == most, left
                )
                if rule is not None:
                    ways.setdefault(rule, []).append(digit)
        return _join(ways)

    def _digits_behind(self, depth: int) -> str:
        """Return an expression for further decimal places after `depth` places."""
        return f"[0-9]{{1,{max(1, self.most - depth)}}}" if self.most else "[0-9]+"

    def _is_past(self, depth: int) -> bool:
        return depth >= max(1, len(self.low.behind), len(self.high.behind) if self.high else 0)


def _join(ways: dict[str, list[int]]) -> str | None:
    texts = [f"{char_set([(48 + d, 48 + d) for d in digits])} {rule}" for rule, digits in ways.items()]
    return f"({' | '.join(texts)})" if texts else None
