"""The search of closing.py: a text goes on byte by byte until it may end."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from mmengine.structured_output.closing.closing_hints import Hints
from mmengine.structured_output.closing.json_place import Place
from mmengine.structured_output.matcher import Matcher

MAX_NUMBERS_TRIED = 300  # one after the other, where no bound hints at one
MAX_OPTIONS = 4  # of keys and values, behind which is looked
LOOKING_PART = 4  # at most one in so many questions is for looking ahead
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")  # a token of no text, among bytes that are forced
_PLAIN = bytes((*b'a0"', *(byte for byte in range(0x21, 0x7F) if byte not in b'a0"\\'), *b" \\\n\t"))
_ODD = bytes(byte for byte in range(256) if byte not in _PLAIN)
_DIGITS = b"0123456789"
_NUMBER = _DIGITS + b".-+eE"
_LIMITS = (16, 64, 256, 1024, 4096)


class Vocabulary:
    """What a closing needs of a tokenizer. `token_bytes`: of every token, b"" for one that no text holds,
    such as an end of sequence; `special_ids`: those that a grammar may ask for all the same; `encode`: text
    to tokens."""

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
        """One token for each byte; None where there are none."""
        found = [self.ids[byte] for byte in text]
        return None if self.lacks_bytes and -1 in found else found

    def text(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.token_bytes[token] for token in tokens)


class Way:
    """A text that goes on: `said` since the search began, as tokens of single bytes or special ones."""

    __slots__ = ("matcher", "place", "said")

    def __init__(self, matcher: Matcher, place: Place, said: Sequence[int] = ()):
        self.matcher, self.place, self.said = matcher, place, [*said]

    def branch(self) -> "Way":
        return Way(self.matcher.deep_copy(), self.place, self.said)

    def become(self, other: "Way") -> None:
        self.matcher, self.place, self.said = other.matcher, other.place, other.said


class Search:
    """`leaves`: those of the hints by their first bytes, each with its tokens. `effort`: how often the
    matcher may be asked. `by_turns`: what was picked least comes first, and not what is shortest."""

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
        self._used: dict[bytes, int] = {}  # how often a value or rest was picked
        self._turns: dict[bytes, dict[int, int]] = {}  # and a byte, where the same was allowed
        self._looks_ahead, self._to_look = False, effort // LOOKING_PART

    def to_end(self, way: Way, limit: int) -> list[int] | None:
        """What is said behind which the text may end, at most `limit` bytes."""
        return way.said if self._go(way, limit, -1) else None

    def _go(self, way: Way, limit: int, depth: int) -> bool:
        """Go on until the text may end; with a `depth` only until the value is whole within which no more
        brackets than that are open. False where that takes more than `limit` bytes in all."""
        while not self._is_done(way, depth):
            if self._left <= 0 or len(way.said) >= limit or not self._step(way, limit):
                return False
        return len(way.said) <= limit

    def _is_done(self, way: Way, depth: int) -> bool:
        if depth < 0:
            return way.matcher.is_accepting()
        return way.place.string is None and len(way.place.inside) == depth and self._may_go_on(way)

    def _may_go_on(self, way: Way) -> bool:
        """Whether the value that was said is whole."""
        if not way.place.inside:
            return way.matcher.is_accepting() or any(self._allows(way, end) for end in self._value_ends(way))
        return any(self._allows(way, bytes((end,))) for end in way.place.bracket + b",")

    def _step(self, way: Way, limit: int) -> bool:
        """Say what comes next; False where nothing does."""
        forced = way.matcher.compute_ff_bytes()
        if forced:
            return self._say_forced(way, forced)
        for end in () if self._hints.calls is None else self._hints.calls.ends(way.place):
            if self._allows(way, end):
                return self._say(way, end)
        if way.place.string is not None:
            return self._say_rest(way, limit)
        if way.place.wants_value:
            return self._say_value(way, limit)
        for text in (b"}", b"]", b":", b'"' if way.place.wants_key else b","):
            if self._allows(way, text):
                return self._say(way, text)
        return self._say_number(way) or self._say_by_turns(way)

    def _say(self, way: Way, text: bytes) -> bool:
        tokens = self._vocabulary.letters(text)
        self._left -= 1
        if tokens is None or not way.matcher.consume_tokens(tokens):
            return False
        way.said += tokens
        way.place = self._hints.advance(way.place, text)
        return True

    def _say_token(self, way: Way, token: int) -> bool:
        way.said.append(token)
        return way.matcher.consume_token(token)

    def _say_forced(self, way: Way, forced: bytes) -> bool:
        special = _SPECIAL.match(forced)
        if special is not None:
            return self._say_token(way, int(special[1]))
        forced = forced.partition(b"\xff[")[0]
        if way.place.string is None:
            forced = forced[:1]  # a value may be whole behind it
        elif b'"' in forced and not self._hints.is_bare:
            forced = forced[: forced.index(b'"') + 1]
        return self._say(way, forced)

    def _allows(self, way: Way, text: bytes) -> bool:
        tokens = self._vocabulary.letters(text)
        return tokens is not None and self._allows_tokens(way, tokens)

    def _allows_tokens(self, way: Way, tokens: list[int]) -> bool:
        self._left -= 1
        if self._vocabulary.lacks_bytes and -1 in tokens:
            return False
        return way.matcher.validate_tokens(tokens) == len(tokens)

    def _value_ends(self, way: Way) -> Sequence[bytes]:
        """What may stand behind a value, where it is in no list or object."""
        return () if self._hints.calls is None else self._hints.calls.value_ends(way.place)

    def _ends(self, way: Way, tokens: list[int] | None) -> bool:
        """Whether these may come next and end what is being said: a key, a value, the bare text."""
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

    def _say_rest(self, way: Way, limit: int) -> bool:
        """Of the string that the way is in."""
        string, end = way.place.string or b"", b"" if self._hints.is_bare else b'"'
        letters = self._vocabulary.letters
        is_key = way.place.wants_key and not way.place.escaped
        due = self._hints.due_rests(string) if is_key else []
        due = [rest + end for rest in due if self._ends(way, letters(rest + end))]
        if due:
            return self._say_due(way, due, limit)
        if end and self._ends(way, letters(end)) and not self._by_turns:
            return self._say(way, end)
        if is_key:
            fit = [rest for rest in self._hints.key_rests(string) if self._ends(way, letters(rest + end))]
            if fit:
                return self._say_key(way, self._hints.best_keys(fit, string), limit)
        rests = [] if way.place.escaped else [rest + end for rest in self._hints.rests(string)]
        found = self._some(rest for rest in rests if self._ends(way, letters(rest)))
        if found:
            return len(found) > 1 and self._say_best(way, found, limit) or self._say_least(way, found)
        return bool(end) and self._allows(way, end) and self._say(way, end) or self._say_by_turns(way)

    def _say_due(self, way: Way, keys: list[bytes], limit: int) -> bool:
        """Of keys that must come in some object, though perhaps not in this one, where they may come too."""
        options = [*keys[: MAX_OPTIONS - 1], b'"']
        if self._say_best(way, options, limit):
            return True
        option = min(keys, key=lambda each: self._used.get(each, 0))  # the same again and again would not end
        self._used[option] = self._used.get(option, 0) + 1
        return self._say(way, option)

    def _say_key(self, way: Way, keys: list[bytes], limit: int) -> bool:
        """That behind which the object ends soonest."""
        ends = [key + b'"' for key in keys]
        if len(keys) > 1 and self._say_best(way, ends, limit):
            return True
        return self._say_least(way, ends)

    def _say_best(self, way: Way, options: list[bytes], limit: int) -> bool:
        """Of what may be said next, that with which what is around it ends soonest, and all up to there;
        False where that is not known, as looking ahead has taken long, or this is looking ahead."""
        if self._by_turns or self._looks_ahead or self._to_look <= 0 or not way.place.inside:
            return False
        self._looks_ahead, kept = True, self._left - self._to_look
        self._left = self._to_look
        best: Way | None = None
        for size in _LIMITS:
            shortest = min(limit, len(way.said) + size)
            for option in options[:MAX_OPTIONS]:
                branch = way.branch()
                self._used[option] = self._used.get(option, 0) + 1
                if self._say(branch, option) and self._go(branch, shortest, len(way.place.inside) - 1):
                    best, shortest = branch, len(branch.said) - 1
            if best is not None or shortest == limit:
                break
        self._looks_ahead, self._to_look = False, self._left
        self._left += kept
        if best is not None:
            way.become(best)
        return best is not None

    def _say_least(self, way: Way, options: list[bytes]) -> bool:
        """The first, or that which was said least, if that is how it goes."""
        option = min(options, key=lambda each: self._used.get(each, 0)) if self._by_turns else options[0]
        self._used[option] = self._used.get(option, 0) + 1
        return self._say(way, option)

    def _say_value(self, way: Way, limit: int) -> bool:
        """A whole one, or how it begins."""
        if way.place.last == ord("[") and self._allows(way, b"]"):
            return self._say(way, b"]")
        leaves = self._fitting(way)
        opening = [each for each in (b"{", b"[") if self._allows(way, each)]
        if leaves:
            longest = min(limit, len(way.said) + len(leaves[0]) - 1)
            if len(leaves[0]) > 3 and self._say_whole(way, opening, longest):
                return True
            constants = [leaf for leaf in leaves if leaf[:1] == b'"' != leaf[1:]]
            if len(constants) > 1 and self._say_best(way, leaves, limit):
                return True
            return self._say_least(way, leaves)
        if self._allows(way, b'"'):
            return self._say(way, b'"')
        if self._say_number(way):
            return True
        if len(opening) > 1 and not self._by_turns:
            return self._say_opened(way, opening, limit)
        return self._say(way, opening[0]) if len(opening) == 1 else self._say_by_turns(way)

    def _fitting(self, way: Way) -> list[bytes]:
        """Values without parts that may be said here, the shortest first, and a few of each kind alone."""
        fitting: list[bytes] = []
        for leaves in self._leaves.values():
            if self._allows_tokens(way, leaves[0][1][:1]):
                fitting += self._some(leaf for leaf, tokens in leaves if self._ends(way, tokens))
        return sorted(fitting, key=len)

    def _some(self, found: Iterator[bytes]) -> list[bytes]:
        """All where they take turns, or a few."""
        return list(found if self._by_turns else islice(found, MAX_OPTIONS))

    def _say_opened(self, way: Way, opening: list[bytes], limit: int) -> bool:
        """A list or an object, where one of both must come: what is tried first may have no end."""
        if self._looks_ahead:
            return self._say_whole(way, opening, limit)
        self._looks_ahead = True
        longest = (min(limit, len(way.said) + size) for size in _LIMITS)
        found = any(self._say_whole(way, opening, size) for size in longest)
        self._looks_ahead = False
        return found

    def _say_whole(self, way: Way, opening: Iterable[bytes], limit: int) -> bool:
        """The shortest list or object, where it takes no more than `limit` bytes in all."""
        best: Way | None = None
        for each in opening:
            branch = way.branch()
            shortest = limit if best is None else len(best.said) - 1
            if self._say(branch, each) and self._go(branch, shortest, len(way.place.inside)):
                best = branch
        if best is not None:
            way.become(best)
        return best is not None

    def _say_number(self, way: Way) -> bool:
        """The shortest number, or rest of one; False where none is found."""
        waiting = [b""]
        for number in waiting:
            last = number[-1] if number else way.place.last
            following = _NUMBER if last in _DIGITS else _NUMBER[:-2]  # where words may stand, e is a letter
            for byte in following if len(waiting) < MAX_NUMBERS_TRIED and self._left > 0 else b"":
                longer = number + bytes((byte,))
                if self._ends(way, self._vocabulary.letters(longer)):
                    return self._say(way, longer)
                if self._allows(way, longer):
                    waiting.append(longer)
        return False

    def _say_by_turns(self, way: Way) -> bool:
        """A byte, or a special token, the one that was picked least where the same was allowed."""
        ids = self._vocabulary.ids
        for kinds in (_PLAIN, _ODD):
            allowed = bytes(byte for byte in kinds if self._allows_tokens(way, [ids[byte]]))
            if allowed:
                used = self._turns.setdefault(allowed, {})
                byte = min(allowed, key=lambda each: used.get(each, 0))
                used[byte] = used.get(byte, 0) + 1
                return self._say(way, bytes((byte,)))
        specials = [token for token in self._vocabulary.special_ids if self._allows_tokens(way, [token])]
        return bool(specials) and self._say_token(way, specials[0])
