"""The shortest way found from a place in a grammar to the end of a text.

The search goes byte by byte and asks the matcher about each: that takes less than a microsecond, a mask
of a large vocabulary up to a thousand times that. Every byte that is allowed leads to some end, so a walk
that picks one after the other needs no way back, only good taste:

1. what is forced;
2. in a string: its shortest rest of those that the grammar's text hints at (closing_hints.py) and that fit;
3. where a value begins: the shortest that has no parts; a list or an object if it is shorter than that;
4. closing brackets, then what opens least;
5. else the byte that was picked least where the same was allowed: whatever a grammar is, its way out gets its
   turn.

Where that comes to no end, values are picked by turns too, and at last all is taken for a text that is no
JSON. The way that is found is said by the tokenizer's tokens. The same grammar, place and vocabulary give the
same tokens on every machine: what is counted is what the matcher is asked, and not time.
"""

from mmengine.structured_output.closing.closing_hints import Hints
from mmengine.structured_output.closing.closing_search import Search, Vocabulary, Way
from mmengine.structured_output.closing.json_place import Place
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.request.tool_calls import OPEN

MAX_CLOSING_TOKENS = 4096  # a longer way is not looked for
MAX_CLOSING_BYTES = 4 * MAX_CLOSING_TOKENS  # nor one of more bytes
# How much the matcher is asked, a microsecond or two each.
MAX_EFFORT = 100_000  # for the shortest text of a grammar
MAX_EFFORT_AT_ONCE = 4_000  # behind a token that was just sampled
_NO_HINTS = Hints([], [], [], [], is_bare=True)


class Closings:
    """Of the texts of one grammar."""

    def __init__(self, vocabulary: Vocabulary, hints: Hints):
        self._vocabulary, self._hints = vocabulary, hints
        self._calls: list[tuple[bytes, bytes]] = []  # how calls begin, and the shortest rest of each
        self._leaves: dict[int, list[tuple[bytes, list[int]]]] = {}  # by their first bytes
        for leaf in hints.leaves:
            tokens = vocabulary.letters(leaf)
            if tokens is not None:
                self._leaves.setdefault(leaf[0], []).append((leaf, tokens))

    def begin(self) -> Place:
        """Where texts of the grammar begin."""
        return Place(string=b"") if self._hints.is_bare else Place()

    def advance(self, place: Place, token: int) -> Place:
        text = self._vocabulary.token_bytes[token]
        return self._hints.advance(place, text)

    def is_free(self, place: Place) -> bool:
        """Whether nothing that was begun is missing at a place where a text may end."""
        return self._hints.is_free(place)

    def letters(self, text: str) -> list[int] | None:
        """One token for each byte of a text; None where there are none."""
        return self._vocabulary.letters(text.encode())

    def shortest(self, matcher: Matcher) -> list[int] | None:
        """Of all texts, where `matcher` stands at their beginning. The shortest calls of tools are kept."""
        found = [self.closing(matcher, self.begin(), MAX_CLOSING_TOKENS, MAX_EFFORT)]
        heads = self._hints.calls.heads if self._hints.calls is not None else ()
        for head in heads:
            letters, branch = self._vocabulary.letters(head), matcher.deep_copy()
            if letters is None or not branch.consume_tokens(letters):
                continue
            place = self._hints.advance(self.begin(), head)
            rest = self.closing(branch, place, MAX_CLOSING_TOKENS, MAX_EFFORT // len(heads))
            if rest is not None:
                self._calls.append((head, self._vocabulary.text(rest)))
                found.append(self._spelled(matcher.deep_copy(), [*letters, *self._letters_of(rest)]))
        return min((path for path in found if path is not None), key=len, default=None)

    def closing(
        self, matcher: Matcher, place: Place, budget: int, effort: int = MAX_EFFORT_AT_ONCE
    ) -> list[int] | None:
        """At most `budget` tokens after which the text is complete; None where none were found. `matcher`
        stays where it is, which is at `place`."""
        ways = [(self._hints, self._leaves, place, by_turns) for by_turns in (False, True)]
        if not self._hints.is_bare:  # it may be no JSON at all
            ways.append((_NO_HINTS, {}, Place(string=b""), True))
        for hints, leaves, here, by_turns in ways:
            search = Search(self._vocabulary, hints, leaves, effort, by_turns)
            limit = min(MAX_CLOSING_BYTES, budget * 64)
            way = search.to_end(Way(matcher.deep_copy(), here), limit)
            if way is None:
                continue
            tokens = self._spelled(matcher.deep_copy(), way)
            if tokens is not None and len(tokens) <= min(budget, MAX_CLOSING_TOKENS):
                return tokens
        return self._known(matcher, place, budget)

    def _known(self, matcher: Matcher, place: Place, budget: int) -> list[int] | None:
        """Of a call, its shortest end where it is what was said so far, and fits."""
        if place.call is None:
            return None
        for head, rest in self._calls:
            whole = head.removeprefix(OPEN.encode()) + rest
            letters = self._vocabulary.letters(whole[len(place.call) :])
            if not whole.startswith(place.call) or letters is None:
                continue
            if matcher.validate_tokens(letters) == len(letters):
                tokens = self._spelled(matcher.deep_copy(), letters)
                return tokens if tokens is not None and len(tokens) <= budget else None
        return None

    def _letters_of(self, tokens: list[int]) -> list[int]:
        return self._vocabulary.letters(self._vocabulary.text(tokens)) or []

    def _spelled(self, matcher: Matcher, way: list[int]) -> list[int] | None:
        """`way`, which is written in tokens of single bytes, in those that the tokenizer would take and masks
        allow. `matcher` goes along."""
        texts, out, at, planned = self._vocabulary.token_bytes, list[int](), 0, list[int]()
        while at < len(way):
            if not texts[way[at]]:  # a special token
                chosen, size, planned = way[at], 1, []
            else:
                forced = matcher.compute_ff_tokens()
                if not planned or forced and forced[0] != planned[-1]:
                    planned = self._planned(way, at)
                chosen = forced[0] if forced else planned[-1]
                size = len(texts[chosen])
                if planned[-1] == chosen:
                    planned.pop()
                else:
                    planned = []
                if texts[chosen] != self._vocabulary.text(way[at : at + size]):
                    return None
            if not matcher.consume_token(chosen):
                return None
            out.append(chosen)
            at += size
        return out

    def _planned(self, way: list[int], at: int) -> list[int]:
        """Tokens of the text of `way` from `at` on, the first one last."""
        texts, end = self._vocabulary.token_bytes, at
        while end < len(way) and texts[way[end]]:
            end += 1
        text = self._vocabulary.text(way[at:end])
        try:
            tokens = self._vocabulary.encode(text.decode())
        except UnicodeDecodeError:
            tokens = []
        if not tokens or self._vocabulary.text(tokens) != text:
            tokens = way[at:end]
        return tokens[::-1]
