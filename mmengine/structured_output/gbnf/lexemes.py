"""Compares lexemes, to decide which pieces of a grammar can safely be lexemes.

The grammar engine's lexer always takes the longest match. The longest match may be wrong if the next
character can either continue a lexeme or begin the next lexeme. Such a lexeme is unsafe and is split further.
Single-character lexemes are always safe.
"""

from dataclasses import dataclass, field

from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.structured_output.regex.sets import Set, have_common
from mmengine.structured_output.regex.tree import Alt, Chars, Node, Ref, Repeat, Seq

MAX_POSITIONS = 400  # Maximum number of positions in a lexeme. A larger lexeme is split.
# Maximum number of steps to compare lexemes and to compute which lexemes may follow each lexeme.
MAX_STEPS = 150_000


@dataclass(slots=True)
class Lexeme:
    """A lexeme as an automaton with numbered positions (Glushkov's construction).

    A position is an occurrence of a character set in the regex. `sets` has each position's characters.
    `first`, `last` and `follow` say which positions begin, end and continue a text.
    """

    sets: list[Set] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    follow: dict[int, set[int]] = field(default_factory=dict)
    nullable: bool = False


def lexeme_of(node: Node) -> Lexeme | None:
    """Return the lexeme for a node, or None if it would have too many positions.

    A counted repetition is treated as unbounded, so some safe lexemes are split too.
    """
    lexeme = Lexeme()
    try:
        lexeme.first, lexeme.last, lexeme.nullable = _positions(node, lexeme)
    except OverflowError:
        return None
    return lexeme


def _positions(node: Node, lexeme: Lexeme) -> tuple[set[int], set[int], bool]:
    """Return the positions at which `node` begins and ends, and whether `node` may be empty."""
    match node:
        case Chars(ranges=ranges):
            at = len(lexeme.sets)
            if at >= MAX_POSITIONS:
                raise OverflowError
            lexeme.sets.append(ranges)
            lexeme.follow[at] = set()
            return {at}, {at}, False
        case Seq(items=items):
            first: set[int] = set()
            last: set[int] = set()
            empty = True
            for item in items:
                begins, ends, may_be_empty = _positions(item, lexeme)
                for place in last:
                    lexeme.follow[place] |= begins
                first |= begins if empty else set()
                last = ends | last if may_be_empty else ends
                empty = empty and may_be_empty
            return first, last, empty
        case Alt(options=options):
            parts = [_positions(option, lexeme) for option in options]
            return (
                set().union(*(part[0] for part in parts)),
                set().union(*(part[1] for part in parts)),
                any(part[2] for part in parts),
            )
        case Repeat(item=item, low=low, high=high):
            first, last, empty = _positions(item, lexeme)
            if high is None or high > 1:
                for place in last:
                    lexeme.follow[place] |= first
            return (set(), set(), True) if high == 0 else (first, last, empty or low == 0)
        case Ref(name=name):
            raise ValueError(f"{name} was not inlined")


class LexemeComparison:
    """Compares a grammar's lexemes. Raises InvalidRequest after too many steps."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._lexemes: dict[str, Lexeme | None] = {}
        self._known: dict[tuple[str, str], tuple[list[Set], bool]] = {}

    def spend(self, steps: int) -> None:
        """Count `steps` against the limit. Raises InvalidRequest if the limit is exceeded."""
        self._left -= steps
        if self._left < 0:
            raise InvalidRequest(
                "the grammar's lexemes cannot be distinguished within the limits; write it with fewer "
                "alternatives that begin alike, or as a Lark grammar",
                code=ErrorCode.INVALID_GRAMMAR,
            )

    def lexeme(self, regex: str, node: Node) -> Lexeme | None:
        """Return the node's lexeme, as `lexeme_of` does, and cache the lexeme by `regex`."""
        if regex not in self._lexemes:
            self._lexemes[regex] = lexeme_of(node)
        return self._lexemes[regex]

    def beyond(self, one: str, other: str) -> tuple[list[Set], bool]:
        """Compare the lexemes with the regexes `one` and `other`. Call `lexeme` for both regexes first.

        Returns the characters that `other` allows after a complete match of `one`, and whether some text
        matches both lexemes.
        """
        key = one, other
        if key not in self._known:
            first, second = self._lexemes[one], self._lexemes[other]
            assert first is not None and second is not None, "only what may be a lexeme is compared"
            self._known[key] = self._compare(first, second)
        return self._known[key]

    def _compare(self, one: Lexeme, other: Lexeme) -> tuple[list[Set], bool]:
        pending = [(p, q) for p in one.first for q in other.first if have_common(one.sets[p], other.sets[q])]
        seen, both = set(pending), False
        ahead: set[int] = set()
        while pending:
            p, q = pending.pop()
            if p in one.last:
                both = both or q in other.last
                ahead |= other.follow[q]
            for r in one.follow[p]:
                for s in other.follow[q]:
                    self._left -= 1  # The call of `spend` below checks the limit.
                    if (r, s) not in seen and have_common(one.sets[r], other.sets[s]):
                        seen.add((r, s))
                        pending.append((r, s))
            self.spend(1)
        return [other.sets[place] for place in ahead], both
