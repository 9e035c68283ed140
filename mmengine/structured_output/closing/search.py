"""Searches for a completion: bytes that extend a partial answer to an end that the grammar allows."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from mmengine.structured_output.closing.hints import Hints
from mmengine.structured_output.closing.json_position import Position
from mmengine.structured_output.matcher import Matcher

MAX_NUMBERS_TRIED = 300  # Maximum number of candidates that `_append_number` tries.
MAX_OPTIONS = 4  # Maximum number of keys or values that a lookahead compares.
LOOKAHEAD_SHARE = 4  # Lookahead may use at most 1/LOOKAHEAD_SHARE of the calls to the matcher.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # A special token among the matcher's forced bytes.
_PLAIN = bytes((*b'a0"', *(byte for byte in range(0x21, 0x7F) if byte not in b'a0"\\'), *b" \\\n\t"))
_ODD = bytes(byte for byte in range(256) if byte not in _PLAIN)
_DIGITS = b"0123456789"
_NUMBER = _DIGITS + b".-+eE"
_LIMITS = (16, 64, 256, 1024, 4096)


class Vocabulary:
    """The tokenizer data for completions. `token_bytes`: every token's bytes, b"" for a special token.
    `special_ids`: special tokens that a grammar may require. `encode`: converts a text to tokens.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int] = (),
        encode: Callable[[str], list[int]] = lambda text: [],
    ):
        self.token_bytes, self.special_ids = token_bytes, sorted(special_ids)
        self.encode = encode
        single = {each[0]: token for token, each in enumerate(token_bytes) if len(each) == 1}
        self.ids = [single.get(byte, -1) for byte in range(256)]
        self.lacks_bytes = -1 in self.ids

    def letters(self, text: bytes) -> list[int] | None:
        """Return a single-byte token for each byte, or None if the vocabulary lacks such a token."""
        found = [self.ids[byte] for byte in text]
        return None if self.lacks_bytes and -1 in found else found

    def text(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes[token] for token in tokens)


class PartialText:
    """A text that the search extends. `tokens`: the appended tokens, which are single-byte tokens and special
    tokens.
    """

    __slots__ = ("matcher", "place", "tokens")

    def __init__(self, matcher: Matcher, place: Position, tokens: Sequence[int] = ()):
        self.matcher, self.place, self.tokens = matcher, place, [*tokens]

    def branch(self) -> "PartialText":
        return PartialText(self.matcher.deep_copy(), self.place, self.tokens)

    def become(self, other: "PartialText") -> None:
        self.matcher, self.place, self.tokens = other.matcher, other.place, other.tokens


class Search:
    """A search for a completion. `leaves` maps each first byte to the values in `hints` that begin with this
    byte, each with its tokens. `effort`: maximum number of calls to the matcher. `by_turns`: whether the
    search prefers the least used option to the shortest option.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        hints: Hints,
        leaves: dict[int, list[tuple[bytes, list[int]]]],
        effort: int,
        by_turns: bool,
    ):
        self._vocabulary, self._hints, self._leaves = vocabulary, hints, leaves
        self._left, self._by_turns = effort, by_turns
        self._used: dict[bytes, int] = {}  # Value or string ending -> how often it was chosen.
        # Set of allowed bytes -> byte -> how often it was chosen.
        self._turns: dict[bytes, dict[int, int]] = {}
        self._is_lookahead, self._lookahead_left = False, effort // LOOKAHEAD_SHARE

    def to_end(self, way: PartialText, limit: int) -> list[int] | None:
        """Return the tokens of a completion with at most `limit` bytes, or None if the search finds none."""
        return way.tokens if self._go(way, limit, -1) else None

    def to_depth(self, way: PartialText, limit: int, depth: int) -> list[int] | None:
        """Return tokens after which a value is complete and `depth` brackets are open. Returns None if the
        search finds no such tokens with at most `limit` bytes.
        """
        return way.tokens if self._go(way, limit, depth) else None

    def _go(self, way: PartialText, limit: int, depth: int) -> bool:
        """Extend the text until a value is complete at `depth`, the number of open brackets. If `depth` is
        negative, extend the text until it may end. Returns False if the search finds no extension with at
        most `limit` bytes.
        """
        while not self._is_done(way, depth):
            if self._left <= 0 or len(way.tokens) >= limit or not self._step(way, limit):
                return False
        return len(way.tokens) <= limit

    def _is_done(self, way: PartialText, depth: int) -> bool:
        if depth < 0:
            return way.matcher.is_accepting()
        return way.place.string is None and len(way.place.inside) == depth and self._may_go_on(way)

    def _may_go_on(self, way: PartialText) -> bool:
        """Return whether the current value is complete."""
        if not way.place.inside:
            return way.matcher.is_accepting() or any(self._allows(way, end) for end in self._value_ends(way))
        return any(self._allows(way, bytes((end,))) for end in way.place.bracket + b",")

    def _step(self, way: PartialText, limit: int) -> bool:
        """Append the next bytes. Returns False if the grammar allows no further byte."""
        forced = way.matcher.compute_ff_bytes()
        if forced:
            return self._append_forced(way, forced)
        for end in () if self._hints.calls is None else self._hints.calls.ends(way.place):
            if self._allows(way, end):
                return self._append(way, end)
        if way.place.string is not None:
            return self._append_rest(way, limit)
        if way.place.wants_value:
            return self._append_value(way, limit)
        for text in (b"}", b"]", b":", b'"' if way.place.wants_key else b","):
            if self._allows(way, text):
                return self._append(way, text)
        return self._append_number(way) or self._append_by_turns(way)

    def _append(self, way: PartialText, text: bytes) -> bool:
        tokens = self._vocabulary.letters(text)
        self._left -= 1
        if tokens is None or not way.matcher.consume_tokens(tokens):
            return False
        way.tokens += tokens
        way.place = self._hints.advance(way.place, text)
        return True

    def _append_token(self, way: PartialText, token: int) -> bool:
        way.tokens.append(token)
        return way.matcher.consume_token(token)

    def _append_forced(self, way: PartialText, forced: bytes) -> bool:
        special = _SPECIAL.match(forced)
        if special is not None:
            return self._append_token(way, int(special[1]))
        forced = forced.partition(b"\xff[")[0]
        if way.place.string is None:
            forced = forced[:1]  # A value may be complete after the first byte.
        elif b'"' in forced and not self._hints.is_bare:
            forced = forced[: forced.index(b'"') + 1]
        return self._append(way, forced)

    def _allows(self, way: PartialText, text: bytes) -> bool:
        tokens = self._vocabulary.letters(text)
        return tokens is not None and self._allows_tokens(way, tokens)

    def _allows_tokens(self, way: PartialText, tokens: list[int]) -> bool:
        self._left -= 1
        if self._vocabulary.lacks_bytes and -1 in tokens:
            return False
        return way.matcher.validate_tokens(tokens) == len(tokens)

    def _value_ends(self, way: PartialText) -> Sequence[bytes]:
        """Return the strings that may follow a value outside lists and objects."""
        return () if self._hints.calls is None else self._hints.calls.value_ends(way.place)

    def _ends(self, way: PartialText, tokens: list[int] | None) -> bool:
        """Return whether the tokens are allowed and complete the current key, value or bare text."""
        if tokens is None or self._left <= 0 or not self._allows_tokens(way, tokens):
            return False
        if way.place.inside:
            ends = b":" if way.place.wants_key else way.place.bracket + b","
            return any(self._allows_tokens(way, [*tokens, self._vocabulary.ids[end]]) for end in ends)
        for value_end in self._value_ends(way):
            letters = self._vocabulary.letters(value_end)
            if letters is not None and self._allows_tokens(way, [*tokens, *letters]):
                return True
        branch = way.matcher.deep_copy()
        return branch.consume_tokens(tokens) and branch.is_accepting()

    def _append_rest(self, way: PartialText, limit: int) -> bool:
        """Append the current string's ending."""
        string, end = way.place.string or b"", b"" if self._hints.is_bare else b'"'
        letters = self._vocabulary.letters
        is_key = way.place.wants_key and not way.place.escaped
        due = self._hints.due_rests(string) if is_key else []
        due = [rest + end for rest in due if self._ends(way, letters(rest + end))]
        if due:
            return self._append_due(way, due, limit)
        if end and self._ends(way, letters(end)) and not self._by_turns:
            return self._append(way, end)
        if is_key:
            fit = [rest for rest in self._hints.key_rests(string) if self._ends(way, letters(rest + end))]
            if fit:
                return self._append_key(way, self._hints.best_keys(fit, string), limit)
        rests = [] if way.place.escaped else [rest + end for rest in self._hints.rests(string)]
        found = self._some(rest for rest in rests if self._ends(way, letters(rest)))
        if found:
            return len(found) > 1 and self._append_best(way, found, limit) or self._append_least(way, found)
        return bool(end) and self._allows(way, end) and self._append(way, end) or self._append_by_turns(way)

    def _append_due(self, way: PartialText, keys: list[bytes], limit: int) -> bool:
        """Append a key that an object in the grammar requires."""
        options = [*keys[: MAX_OPTIONS - 1], b'"']
        if self._append_best(way, options, limit):
            return True
        # Use the least used key, because repeating the same key might never end.
        option = min(keys, key=lambda each: self._used.get(each, 0))
        self._used[option] = self._used.get(option, 0) + 1
        return self._append(way, option)

    def _append_key(self, way: PartialText, keys: list[bytes], limit: int) -> bool:
        """Append the key that leads to the shortest object."""
        ends = [key + b'"' for key in keys]
        if len(keys) > 1 and self._append_best(way, ends, limit):
            return True
        return self._append_least(way, ends)

    def _append_best(self, way: PartialText, options: list[bytes], limit: int) -> bool:
        """Append the option with which the enclosing list or object becomes shortest, and the text up to the
        closing bracket. Returns False if no option is chosen, for example if this search is itself a
        lookahead.
        """
        if self._by_turns or self._is_lookahead or self._lookahead_left <= 0 or not way.place.inside:
            return False
        self._is_lookahead, kept = True, self._left - self._lookahead_left
        self._left = self._lookahead_left
        best: PartialText | None = None
        for size in _LIMITS:
            shortest = min(limit, len(way.tokens) + size)
            for option in options[:MAX_OPTIONS]:
                branch = way.branch()
                self._used[option] = self._used.get(option, 0) + 1
                if self._append(branch, option) and self._go(branch, shortest, len(way.place.inside) - 1):
                    best, shortest = branch, len(branch.tokens) - 1
            if best is not None or shortest == limit:
                break
        self._is_lookahead, self._lookahead_left = False, self._left
        self._left += kept
        if best is not None:
            way.become(best)
        return best is not None

    def _append_least(self, way: PartialText, options: list[bytes]) -> bool:
        """Append the first option or, with `by_turns`, the least used option."""
        option = min(options, key=lambda each: self._used.get(each, 0)) if self._by_turns else options[0]
        self._used[option] = self._used.get(option, 0) + 1
        return self._append(way, option)

    def _append_value(self, way: PartialText, limit: int) -> bool:
        """Append a whole value, or its beginning."""
        if way.place.last == ord("[") and self._allows(way, b"]"):
            return self._append(way, b"]")
        leaves = self._fitting(way)
        opening = [each for each in (b"{", b"[") if self._allows(way, each)]
        if leaves:
            longest = min(limit, len(way.tokens) + len(leaves[0]) - 1)
            if len(leaves[0]) > 3 and self._append_whole(way, opening, longest):
                return True
            constants = [leaf for leaf in leaves if leaf[:1] == b'"' != leaf[1:]]
            if len(constants) > 1 and self._append_best(way, leaves, limit):
                return True
            return self._append_least(way, leaves)
        if self._allows(way, b'"'):
            return self._append(way, b'"')
        if self._append_number(way):
            return True
        if len(opening) > 1 and not self._by_turns:
            return self._append_opened(way, opening, limit)
        return self._append(way, opening[0]) if len(opening) == 1 else self._append_by_turns(way)

    def _fitting(self, way: PartialText) -> list[bytes]:
        """Return values that are allowed at this position, shortest first, and only a few for each first
        byte.
        """
        fitting: list[bytes] = []
        for leaves in self._leaves.values():
            if self._allows_tokens(way, leaves[0][1][:1]):
                fitting += self._some(leaf for leaf, tokens in leaves if self._ends(way, tokens))
        return sorted(fitting, key=len)

    def _some(self, found: Iterator[bytes]) -> list[bytes]:
        """Return the first few candidates, or with `by_turns` all candidates."""
        return list(found if self._by_turns else islice(found, MAX_OPTIONS))

    def _append_opened(self, way: PartialText, opening: list[bytes], limit: int) -> bool:
        """Append a list or an object. The byte limit grows with each try, because an option may never end."""
        if self._is_lookahead:
            return self._append_whole(way, opening, limit)
        self._is_lookahead = True
        longest = (min(limit, len(way.tokens) + size) for size in _LIMITS)
        found = any(self._append_whole(way, opening, size) for size in longest)
        self._is_lookahead = False
        return found

    def _append_whole(self, way: PartialText, opening: Iterable[bytes], limit: int) -> bool:
        """Append the shortest list or object with at most `limit` bytes. Returns False if there is none."""
        best: PartialText | None = None
        for each in opening:
            branch = way.branch()
            shortest = limit if best is None else len(best.tokens) - 1
            if self._append(branch, each) and self._go(branch, shortest, len(way.place.inside)):
                best = branch
        if best is not None:
            way.become(best)
        return best is not None

    def _append_number(self, way: PartialText) -> bool:
        """Append the shortest number or the shortest ending for a number. Returns False if none is found."""
        waiting = [b""]
        for number in waiting:
            last = number[-1] if number else way.place.last
            # The letter e continues a number only after a digit.
            following = _NUMBER if last in _DIGITS else _NUMBER[:-2]
            for byte in following if len(waiting) < MAX_NUMBERS_TRIED and self._left > 0 else b"":
                longer = number + bytes((byte,))
                if self._ends(way, self._vocabulary.letters(longer)):
                    return self._append(way, longer)
                if self._allows(way, longer):
                    waiting.append(longer)
        return False

    def _append_by_turns(self, way: PartialText) -> bool:
        """Append the allowed byte that this search chose least often. Uses are counted separately for each
        set of allowed bytes. If no byte is allowed, appends a special token.
        """
        ids = self._vocabulary.ids
        for kinds in (_PLAIN, _ODD):
            allowed = bytes(byte for byte in kinds if self._allows_tokens(way, [ids[byte]]))
            if allowed:
                used = self._turns.setdefault(allowed, {})
                byte = min(allowed, key=lambda each: used.get(each, 0))
                used[byte] = used.get(byte, 0) + 1
                return self._append(way, bytes((byte,)))
        specials = [token for token in self._vocabulary.special_ids if self._allows_tokens(way, [token])]
        return bool(specials) and self._append_token(way, specials[0])
