"""Computes which lexemes may follow each lexeme, and finds lexemes that must be split further."""

from collections.abc import Iterator

from mmengine.structured_output.gbnf.lexeme_splitter import Group, LexemeSplitter, Part, Piece
from mmengine.structured_output.gbnf.lexemes import Lexeme, LexemeComparison
from mmengine.structured_output.regex.sets import Set, have_common, set_of
from mmengine.structured_output.regex.tree import Ref


def unsafe_pieces(cutter: LexemeSplitter, comparison: LexemeComparison) -> set[str]:
    """Return the regexes of lexemes that must be split further (see lexemes.py)."""
    lexemes = {regex: comparison.lexeme(regex, piece.node) for regex, piece in cutter.pieces.items()}
    large = {regex for regex, lexeme in lexemes.items() if lexeme is None}
    if large:
        return large
    found = {regex: lexeme for regex, lexeme in lexemes.items() if lexeme is not None}
    return _FollowSets(cutter, found, comparison).conflicts(comparison)


class _FollowSets:
    """Computes FIRST and FOLLOW sets. A lexeme set is an integer with a bit for each lexeme."""

    def __init__(self, cutter: LexemeSplitter, lexemes: dict[str, Lexeme], comparison: LexemeComparison):
        self._rules = cutter.rules
        self._lexemes = list(lexemes.values())
        self._regexes = list(lexemes)
        self._numbers = {regex: at for at, regex in enumerate(lexemes)}
        # Rule -> (FIRST set, whether the rule may be empty).
        self._first = dict.fromkeys(self._rules, (0, False))
        self._behind_rule = dict.fromkeys(self._rules, 0)  # Rule -> FOLLOW set.
        self._behind = [0] * len(self._lexemes)  # FOLLOW set by lexeme number.
        self._begin: dict[int, Set] = {}  # Lexeme set -> characters with which its lexemes may begin.
        self._settle(comparison)

    def _settle(self, comparison: LexemeComparison) -> None:
        # Comparing two lexemes counts as a step. Visiting ten parts costs about as much.
        steps = len(self._rules) + sum(map(_parts, self._rules.values())) // 10
        changed = True
        while changed:
            comparison.spend(steps)
            changed = False
            # Visit the rules in reverse order, because most rules refer to later rules.
            for name, part in reversed(self._rules.items()):
                found = self._first_of(part)
                changed = changed or found != self._first[name]
                self._first[name] = found
        changed = True
        while changed:
            comparison.spend(steps)
            before = list(self._behind), dict(self._behind_rule)
            for name, part in self._rules.items():
                self._walk(part, self._behind_rule[name])
            changed = before != (self._behind, self._behind_rule)

    def _first_of(self, part: Part) -> tuple[int, bool]:
        match part:
            case Piece(regex=regex):
                number = self._numbers[regex]
                return 1 << number, self._lexemes[number].nullable
            case Ref(name=name):
                return self._first[name]
            case Group(parts=parts, between="|"):
                found = [self._first_of(each) for each in parts]
                bits = 0
                for more, _ in found:
                    bits |= more
                return bits, any(empty for _, empty in found)
            case Group(parts=parts, low=low):
                bits, empty = 0, True
                for each in parts:
                    more, may_be_empty = self._first_of(each)
                    bits |= more if empty else 0
                    empty = empty and may_be_empty
                return bits, empty or low == 0

    def _walk(self, part: Part, behind: int) -> None:
        match part:
            case Piece(regex=regex):
                self._behind[self._numbers[regex]] |= behind
            case Ref(name=name):
                self._behind_rule[name] |= behind
            case Group(parts=parts, between="|"):
                for each in parts:
                    self._walk(each, behind)
            case Group(parts=parts, high=high):
                if high is None or high > 1:
                    behind |= self._first_of(part)[0]
                for each in reversed(parts):
                    self._walk(each, behind)
                    bits, empty = self._first_of(each)
                    behind = bits | (behind if empty else 0)

    def conflicts(self, comparison: LexemeComparison) -> set[str]:
        # `pending` has sets of lexemes that may begin at the same position. For two lexemes in such a set,
        # `other` is unsafe if a character after a match of `one` can either continue `other` or begin a
        # lexeme that follows `one`. If a text matches both, the lexemes that follow them may also begin at
        # the same position.
        found: set[str] = set()
        seen: set[tuple[int, int]] = set()
        pending = [self._first["root"][0], *self._behind]
        known = set(pending)
        while pending:
            numbers = list(_bits(pending.pop()))
            for one in numbers:
                for other in numbers:
                    if (one, other) in seen:
                        continue
                    seen.add((one, other))
                    comparison.spend(1)
                    ahead, both = comparison.beyond(self._regexes[one], self._regexes[other])
                    if any(have_common(ranges, self._beginning(self._behind[one])) for ranges in ahead):
                        found.add(self._regexes[other])
                    together = self._behind[one] | self._behind[other]
                    if both and together not in known:
                        known.add(together)
                        pending.append(together)
        return found

    def _beginning(self, bits: int) -> Set:
        """Return the characters with which a lexeme in the set may begin."""
        if bits not in self._begin:
            pairs = [
                pair
                for number in _bits(bits)
                for place in self._lexemes[number].first
                for pair in self._lexemes[number].sets[place]
            ]
            self._begin[bits] = set_of(pairs)
        return self._begin[bits]


def _parts(part: Part) -> int:
    """Return how many parts `part` has, including itself and nested parts."""
    return 1 + sum(map(_parts, part.parts)) if isinstance(part, Group) else 1


def _bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
