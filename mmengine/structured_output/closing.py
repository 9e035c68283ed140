"""The shortest way found from a place in a grammar to the end of a text.

The search looks at masks and goes on by tokens; it does not know what the grammar says. Every token that a
mask allows leads to some end, so a walk that picks one after the other needs no way back, only good taste:

1. where the grammar forces tokens, these;
2. inside of a text (letters may follow): a quotation mark with all brackets behind it that are allowed;
3. outside: closing brackets, then the smallest values, then what opens least;
4. else the kind of token (its first byte) that was picked least where the same was allowed. Whatever
   automaton a pattern is, its way out gets its turn; odd kinds, of which few are allowed, come first.

Where that comes to no end, walks with less of that taste are tried. For the shortest way of
all other picks are tried too, at each place of the shortest walk, the first place first. The same grammar,
place and vocabulary give the same tokens on every machine.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any

import numpy as np

from mmengine.structured_output.matcher import Matcher

MAX_CLOSING_TOKENS = 4096  # a longer way is not looked for
# How far is searched, in masks read; no clock, for the same way must be found on every machine. Picking by
# turns looks at the whole vocabulary, and counts by its size.
MAX_EFFORT = 14_000  # of a walk to the shortest one, and of shortening that
MAX_EFFORT_AT_ONCE = 8_000  # behind a token that was just sampled
TOKENS_AN_EFFORT = 10_000
NEAR_TOKENS = 64  # by which one may be longer than that of the place before, at first
MAX_PICKS = 20  # that are tried at one place
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


class Taste(Enum):
    """How a walk picks: as said above; objects before lists; values by turns; everything by turns."""

    FIRST = "first"
    OBJECTS = "objects"
    VALUES_BY_TURNS = "values by turns"
    BY_TURNS = "by turns"


class _Effort:
    """What a search may still cost."""

    __slots__ = ("left",)

    def __init__(self, left: int):
        self.left = left


class Vocabulary:
    """Which tokens a closing prefers. `token_bytes`: of every token, b"" for one that no text holds, such
    as an end of sequence."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self._first = np.array([each[0] if each else _NO_BYTE for each in token_bytes], np.int64)
        self._effort_by_turns = 1 + len(token_bytes) // TOKENS_AN_EFFORT
        signs = [(token, each) for token, each in enumerate(token_bytes) if _SIGNS.match(each)]
        self._after_text = _matching(signs, _AFTER_TEXT)
        self._outside = _matching(signs, _OUTSIDE + _OPENS)
        self._objects_first = _matching(signs, _OUTSIDE + _OPENS[::-1])
        self._begins_text = _matching(signs, _BEGINS_TEXT)
        single = {each[0]: token for token, each in enumerate(token_bytes) if len(each) == 1}
        self._letters = np.array([single[byte] for byte in _LETTERS if byte in single], np.int64)
        self._quote = single.get(ord('"'), next(iter(self._after_text.tolist()), -1))
        # Among tokens of the same first byte; long ones of plain characters fill what has a least length.
        self._long_first = _ranks([(not each.isalnum(), -len(each)) for each in token_bytes])
        self._short_first = _ranks([len(each) for each in token_bytes])

    def closing(self, matcher: Matcher, budget: int, near: int = 0) -> list[int] | None:
        """At most `budget` tokens after which the text is complete; None where none were found. `matcher`
        stays where it is. `near`: how many it may well be."""
        effort = _Effort(MAX_EFFORT_AT_ONCE)
        longest, limit = min(budget, MAX_CLOSING_TOKENS), near + NEAR_TOKENS
        while True:
            limit = min(limit, longest)
            for taste in Taste:
                path = self._walk(matcher.deep_copy(), limit, taste, effort)
                if path is not None:
                    return path
            if limit == longest or effort.left <= 0:
                return None
            limit *= 8

    def shortest(self, matcher: Matcher) -> list[int] | None:
        """As short a closing as can be found, in up to seconds."""
        for taste in Taste:
            best = self._walk(matcher.deep_copy(), MAX_CLOSING_TOKENS, taste, _Effort(MAX_EFFORT))
            if best is not None:
                return self._shorten(best, matcher.deep_copy(), _Effort(MAX_EFFORT))
        return None

    def _walk(self, matcher: Matcher, limit: int, taste: Taste, effort: _Effort) -> list[int] | None:
        """To an end, in at most `limit` tokens. `matcher` goes along."""
        path: list[int] = []
        used: dict[bytes, dict[int, int]] = {}
        while not matcher.is_accepting():
            if len(path) >= limit or effort.left <= 0 or matcher.is_error():
                return None
            some = matcher.compute_ff_tokens()
            if not some:
                mask = matcher.compute_bitmask()
                times = used.setdefault(mask, {})
                token = None
                if taste is not Taste.BY_TURNS:
                    token = next(self._preferred(mask, times, taste), None)
                effort.left -= 1 if token is not None else self._effort_by_turns
                if token is None:
                    token = next(self._by_turns(mask, times), None)
                if token is None:
                    return None
                some, kind = [token], self._kind(token)
                times[kind] = times.get(kind, 0) + 1
            if not matcher.consume_tokens(some):
                return None
            path += some
        return path if len(path) <= limit else None

    def _shorten(self, best: list[int], matcher: Matcher, effort: _Effort) -> list[int]:
        """Other picks along `best`, where the matcher stands at its beginning."""
        at = 0
        while at < len(best) and effort.left > 0:
            mask = matcher.compute_bitmask()
            effort.left -= self._effort_by_turns
            picks = chain(self._preferred(mask, {}, Taste.FIRST), self._by_turns(mask, {}))
            for token in islice(picks, MAX_PICKS):
                branch = matcher.deep_copy()
                if token == best[at] or not branch.consume_tokens([token]):
                    continue
                rest = self._walk(branch, len(best) - at - 2, Taste.FIRST, effort)
                if rest is not None:
                    best = [*best[:at], token, *rest]
            matcher.consume_tokens([best[at]])
            at += 1
        return best

    def _by_turns(self, mask: bytes, times: Mapping[int, int]) -> Iterator[int]:
        """Allowed tokens, the best first, a long and a short one of each kind. `times`: how often each
        was picked where the same was allowed."""
        bits = np.frombuffer(mask, np.uint8)
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
            both = [int(some[rank[some].argmin()]) for rank in (self._long_first, self._short_first)]
            yield from reversed(both) if times.get(kind, 0) % 2 else both

    def _kind(self, token: int) -> int:
        return int(self._first[token])

    def _preferred(self, mask: bytes, times: Mapping[int, int], taste: Taste) -> Iterator[int]:
        """By rules 2 and 3: the first allowed token of each kind; digits, or all values, take turns."""
        bits = np.frombuffer(mask, np.uint8)
        if _are_allowed(bits, self._letters).any():
            wanted = self._after_text
        else:
            wanted = self._objects_first if taste is Taste.OBJECTS else self._outside
        turning = _VALUES if taste is Taste.VALUES_BY_TURNS else _DIGITS
        found: dict[int, int] = {}
        for token in wanted[_are_allowed(bits, wanted)].tolist():
            found.setdefault(self._kind(token), token)
        if ord('"') in found and _are_allowed(bits, self._begins_text).any():
            found[ord('"')] = self._quote
        places = iter(
            sorted((kind for kind in found if kind in turning), key=lambda kind: times.get(kind, 0))
        )
        for kind in found:
            yield found[next(places) if kind in turning else kind]


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


def _ranks(keys: Sequence[Any]) -> np.ndarray:
    """The place of each in their order; of equals the first is first."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys))
    return ranks


def _is_odd(first: int) -> bool:
    """Parts of characters, escapes and control characters come last."""
    return not 0x20 <= first < 0x7F or first == ord("\\")
