"""The shortest way found from a place in a grammar to the end of a text.

The search looks at masks and goes on by tokens; it does not know what the grammar says. Every token that a
mask allows leads to some end, so a walk that picks one after the other needs no way back, only good taste:

1. where the grammar forces tokens, these;
2. inside of a text (letters may follow): a quotation mark with all brackets behind it that are allowed;
3. outside: closing brackets, then the smallest values, then what opens least;
4. else the kind of token (its first byte) that was picked least where the same was allowed. Whatever
   automaton a pattern is, its way out gets its turn; odd kinds, of which few are allowed, come first.

Where the end is too far, walks with less of that taste are tried; then other picks, one at each place of the
shortest walk, the first place first. The same grammar, place and vocabulary give the same tokens on every
machine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Protocol

import numpy as np

from mmengine.structured_output.base import Matcher

MAX_CLOSING_TOKENS = 4096  # a longer way is not looked for
MAX_TRIES = 4096  # masks read for one closing
TRIES_WHILE_SAID = 128  # the same, of a closing behind a token that was just sampled
MAX_PICKS = 12  # that are tried at one place
_NO_BYTE = 256  # first byte of a token that no text holds

_AFTER_TEXT = (rb'":?[}\]]*',)
_OUTSIDE = (
    rb"[}\]]+",
    rb',"',
    rb",",
    rb':(\[\]|\{\}|""|null|true|false)[}\]]*',
    rb":",
    rb'(""|\[\]|\{\})[}\]]*',
    rb"[0-9]",
    rb"(null|true|false)[}\]]*",
    rb"n(ul?)?|t(ru?)?|f(a(ls?)?)?",
    *_AFTER_TEXT,
)
_OPENS = (rb"\[", rb'\{"', rb"\{")
_BEGINS_TEXT = (rb'"[^\s:,}\]"].*',)  # a quotation mark that ends a text is not followed by such
_SIGNS = re.compile(rb'[\[\]{}",:0-9ntf]')  # how all of these begin
_DIGITS = frozenset(b"0123456789")
_VALUES = _DIGITS | frozenset(b'"[{ntf')  # first bytes
_LETTERS = rb"abcdghijkmopqrsuvwxyzABCDGHIJKLMOPQRSUVWXYZ"  # none begins a value or goes on in a number


class Searchable(Matcher, Protocol):
    """A matcher that can be tried out."""

    def deep_copy(self) -> "Searchable": ...

    def consume_token(self, token_id: int) -> bool: ...

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def compute_ff_tokens(self) -> list[int]:
        """What the grammar forces next; may be empty though it forces something."""

    def compute_bitmask(self) -> bytes:
        """What it allows next: token t is bit t % 8 of byte t // 8."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """How many of them, from the first, it would take."""


class Taste(Enum):
    """How a walk picks: as said above; objects before lists; values by turns; everything by turns."""

    FIRST = "first"
    OBJECTS = "objects"
    VALUES_BY_TURNS = "values by turns"
    BY_TURNS = "by turns"


class Vocabulary:
    """Which tokens a closing prefers. `token_bytes`: of every token, b"" for one that no text holds, such
    as an end of sequence."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self._first = np.array([each[0] if each else _NO_BYTE for each in token_bytes], np.int64)
        signs = [(token, each) for token, each in enumerate(token_bytes) if _SIGNS.match(each)]
        self._after_text = _matching(signs, _AFTER_TEXT)
        self._outside = _matching(signs, _OUTSIDE + _OPENS)
        self._objects_first = _matching(signs, _OUTSIDE + _OPENS[::-1])
        self._begins_text = _matching(signs, _BEGINS_TEXT)
        single = {each[0]: token for token, each in enumerate(token_bytes) if len(each) == 1}
        self._letters = np.array([single[byte] for byte in _LETTERS if byte in single], np.int64)
        self._quote = single.get(ord('"'), next(iter(self._after_text.tolist()), -1))
        self._rank = np.empty(len(token_bytes), np.int64)  # among tokens of the same first byte
        order = sorted(range(len(token_bytes)), key=lambda token: _plainness(token_bytes[token]))
        self._rank[order] = np.arange(len(token_bytes))

    def closing(self, matcher: Searchable, budget: int, tries: int = MAX_TRIES) -> list[int] | None:
        """At most `budget` tokens after which the text is complete; None where none were found. `matcher`
        stays where it is. `tries` bounds the masks that are read to shorten a walk."""
        return _Search(self, matcher, tries).run(min(budget, MAX_CLOSING_TOKENS))

    def picks(self, mask: bytes, times: Mapping[int, int], taste: Taste) -> Iterator[int]:
        """Allowed tokens, the best first, about one of each kind. `times`: how often each kind was picked
        where the same was allowed."""
        bits = np.frombuffer(mask, np.uint8)
        if taste is not Taste.BY_TURNS:
            yield from self._preferred(bits, times, taste)
        allowed = np.flatnonzero(np.unpackbits(bits, count=len(self._first), bitorder="little"))
        kinds = self._first[allowed]
        counts = np.bincount(kinds, minlength=_NO_BYTE + 1)[:_NO_BYTE]
        # A kind of many tokens has long ones, a kind of few is more likely to lead out: by turns, too.
        sign = 1 if sum(times.values()) % 2 else -1
        order = sorted(
            np.flatnonzero(counts).tolist(),
            key=lambda kind: (times.get(kind, 0), _is_odd(kind), sign * int(counts[kind]), kind),
        )
        for kind in order:
            some = allowed[kinds == kind]
            yield int(some[self._rank[some].argmin()])

    def kind(self, token: int) -> int:
        return int(self._first[token])

    def _preferred(self, bits: np.ndarray, times: Mapping[int, int], taste: Taste) -> Iterator[int]:
        """By rules 2 and 3: the first allowed token of each kind; digits, or all values, take turns."""
        if _are_allowed(bits, self._letters).any():
            wanted = self._after_text
        else:
            wanted = self._objects_first if taste is Taste.OBJECTS else self._outside
        turning = _VALUES if taste is Taste.VALUES_BY_TURNS else _DIGITS
        found: dict[int, int] = {}
        for token in wanted[_are_allowed(bits, wanted)].tolist():
            found.setdefault(self.kind(token), token)
        if ord('"') in found and _are_allowed(bits, self._begins_text).any():
            found[ord('"')] = self._quote
        places = iter(
            sorted((kind for kind in found if kind in turning), key=lambda kind: times.get(kind, 0))
        )
        for kind in found:
            yield found[next(places) if kind in turning else kind]


class _Search:
    """One closing: the best walk so far, and how much may still be tried."""

    def __init__(self, vocabulary: Vocabulary, matcher: Searchable, tries: int):
        self._vocabulary, self._start, self._tries = vocabulary, matcher, tries

    def run(self, budget: int) -> list[int] | None:
        longest, best = min(2 * budget + self._tries, MAX_CLOSING_TOKENS), None
        for taste in Taste:
            path = self._walk(self._start.deep_copy(), longest, taste)
            if path is not None:
                best, longest = path, len(path) - 1
            if best is not None and len(best) <= budget:
                return best
        if best is not None:
            best = self._shorten(best, budget)
        return best if best is not None and len(best) <= budget else None

    def _walk(self, matcher: Searchable, limit: int, taste: Taste) -> list[int] | None:
        """To an end, in at most `limit` tokens. `matcher` goes along."""
        path: list[int] = []
        used: dict[bytes, dict[int, int]] = {}
        while not matcher.is_accepting():
            if len(path) >= limit or matcher.is_error():
                return None
            some = matcher.compute_ff_tokens()
            if not some:
                mask = matcher.compute_bitmask()
                self._tries -= 1
                times = used.setdefault(mask, {})
                token = next(self._vocabulary.picks(mask, times, taste), None)
                if token is None:
                    return None
                some, kind = [token], self._vocabulary.kind(token)
                times[kind] = times.get(kind, 0) + 1
            if not matcher.consume_tokens(some):
                return None
            path += some
        return path if len(path) <= limit else None

    def _shorten(self, best: list[int], budget: int) -> list[int]:
        """Other picks along `best`, as long as it needs more than `budget`."""
        matcher, at = self._start.deep_copy(), 0
        while at < len(best) and len(best) > budget and self._tries > 0:
            self._tries -= 1
            picks = self._vocabulary.picks(matcher.compute_bitmask(), {}, Taste.FIRST)
            for token in islice(picks, MAX_PICKS):
                branch = matcher.deep_copy()
                if token == best[at] or not branch.consume_tokens([token]):
                    continue
                rest = self._walk(branch, len(best) - at - 2, Taste.FIRST)
                if rest is not None:
                    best = [*best[:at], token, *rest]
            matcher.consume_tokens([best[at]])
            at += 1
        return best


class Closer:
    """Keeps one text such that it can still be completed within its budget.

    `path`: a closing that is known where the text stands; None once there is none. It follows from the tokens
    that were said, so whoever goes through them again, after a preemption or a crash, goes on alike.
    """

    def __init__(self, vocabulary: Vocabulary, path: list[int], ends: Sequence[int]):
        """At the beginning; `ends`: tokens that are allowed exactly where a text may end."""
        self.path: list[int] | None = path
        self._vocabulary, self._ends = vocabulary, ends
        self._next: tuple[int, list[int] | None] = (-1, None)  # a token, and the closing behind it

    def keep(self, matcher: Searchable, token: int, left: int) -> int:
        """What to say where the model said `token` and `left` tokens may be said, this one included: `token`,
        or what the known closing says where none was found behind `token`. The matcher stays where it is."""
        if token in self._ends or self.path is None:
            return token
        self._next = (token, self._behind(matcher, token, left - 1))
        if self._next[1] is not None:
            return token
        return self.path[0] if self.path else self._ends[0]

    def said(self, matcher: Searchable, token: int, left: int) -> None:
        """The text goes on by `token`, which the matcher is yet to consume; `left` as for `keep`."""
        if self.path is None:
            return
        known, self._next = self._next, (-1, None)
        self.path = known[1] if known[0] == token else self._behind(matcher, token, left - 1)

    def _behind(self, matcher: Searchable, token: int, left: int) -> list[int] | None:
        """A closing behind `token`, of at most `left` tokens."""
        path = self.path
        if path and token == path[0]:
            return path[1:]
        branch = matcher.deep_copy()
        if not branch.consume_token(token):
            return None
        if 0 < len(path) <= left and branch.validate_tokens([*path, self._ends[0]]) > len(path):
            return path
        return self._vocabulary.closing(branch, left, TRIES_WHILE_SAID)


def _matching(tokens: Iterable[tuple[int, bytes]], patterns: Sequence[bytes]) -> np.ndarray:
    """Tokens by the first pattern that they match, the longest first."""
    compiled = [re.compile(pattern, re.DOTALL) for pattern in patterns]
    found = []
    for token, text in tokens:
        place = next((at for at, pattern in enumerate(compiled) if pattern.fullmatch(text)), None)
        if place is not None:
            found.append((place, -len(text), token))
    return np.array([token for _, _, token in sorted(found)], np.int64)


def _are_allowed(bits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (bits[tokens >> 3] >> (tokens & 7) & 1).astype(bool)


def _plainness(text: bytes) -> tuple[bool, int]:
    """Long tokens of plain characters first: they fill what has a least length."""
    return not text.isalnum(), -len(text)


def _is_odd(first: int) -> bool:
    """Parts of characters, escapes and white space come last."""
    return not 0x20 < first < 0x7F or first == ord("\\")
