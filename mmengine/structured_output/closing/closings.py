"""Searches for a short completion: tokens that end a partial text in agreement with its grammar.

The search asks the matcher about each byte. A question takes 1 to 2 µs; a mask for a large vocabulary takes
up to a thousand times longer. Every allowed byte leads to some end. A greedy search therefore needs no
backtracking, only good preferences:

1. forced bytes;
2. in a string, the shortest ending that the hints from the grammar suggest (hints.py);
3. at a value's start, the shortest scalar, list or object;
4. a closing bracket, else a colon, a quotation mark for a key, or a comma;
5. otherwise the byte that was chosen least often when the same bytes were allowed.

If the search finds no end within its limits, a second search prefers the least used values and string endings
(`by_turns`). If the second search fails too, a third search treats the text as plain text. The completion's
bytes are then converted to the tokens that the tokenizer would choose. The limit is a number of questions to
the matcher, not a time, so every machine finds the same tokens.
"""

from mmengine.structured_output.closing.hints import Hints
from mmengine.structured_output.closing.json_position import Position
from mmengine.structured_output.closing.search import PartialText, Search, Vocabulary
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.request.tool_calls import OPEN

MAX_CLOSING_TOKENS = 4096  # Maximum number of tokens in a completion.
MAX_CLOSING_BYTES = 4 * MAX_CLOSING_TOKENS  # Maximum number of bytes in a completion.
# The next limits count questions to the matcher. A question takes 1 to 2 µs.
MAX_EFFORT = 100_000  # Limit for a grammar's shortest text.
MAX_EFFORT_AT_ONCE = 4_000  # Limit after each sampled token.
MAX_EFFORT_INSIDE = 400  # Limit for ending the innermost value in a deeply nested text.
_NO_HINTS = Hints([], [], [], [], is_bare=True)


class Closings:
    """Finds completions for a grammar's texts."""

    def __init__(self, vocabulary: Vocabulary, hints: Hints):
        self._vocabulary, self._hints = vocabulary, hints
        self._calls: list[tuple[bytes, bytes]] = []  # (beginning, shortest ending) for each tool's call.
        # First byte -> scalars with their tokens.
        self._leaves: dict[int, list[tuple[bytes, list[int]]]] = {}
        for leaf in hints.leaves:
            tokens = vocabulary.letters(leaf)
            if tokens is not None:
                self._leaves.setdefault(leaf[0], []).append((leaf, tokens))

    def begin(self) -> Position:
        """Return the position before any text."""
        return Position(string=b"") if self._hints.is_bare else Position()

    def advance(self, place: Position, token: int) -> Position:
        text = self._vocabulary.token_bytes[token]
        return self._hints.advance(place, text)

    def is_free(self, place: Position) -> bool:
        """Return whether the text is free text without tool calls. Free text is complete at any position."""
        return self._hints.is_free(place)

    def letters(self, text: str) -> list[int] | None:
        """Return a text as single-byte tokens, or None if the vocabulary lacks a byte."""
        return self._vocabulary.letters(text.encode())

    def shortest(self, matcher: Matcher) -> list[int] | None:
        """Return the tokens for the grammar's shortest text, or None if none was found.

        `matcher` must be at the text's beginning. The shortest call to each tool is stored for later
        completions.
        """
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
        self, matcher: Matcher, place: Position, budget: int, effort: int = MAX_EFFORT_AT_ONCE
    ) -> list[int] | None:
        """Return at most `budget` tokens that complete the text, or None if none were found.

        `matcher` is at `place` and does not advance.
        """
        ways = [(self._hints, self._leaves, place, by_turns) for by_turns in (False, True)]
        # If the grammar's texts are not JSON, the search without hints may succeed.
        if not self._hints.is_bare:
            ways.append((_NO_HINTS, {}, Position(string=b""), True))
        for hints, leaves, here, by_turns in ways:
            search = Search(self._vocabulary, hints, leaves, effort, by_turns)
            limit = min(MAX_CLOSING_BYTES, budget * 64)
            way = search.to_end(PartialText(matcher.deep_copy(), here), limit)
            if way is None:
                continue
            tokens = self._spelled(matcher.deep_copy(), way)
            if tokens is not None and len(tokens) <= min(budget, MAX_CLOSING_TOKENS):
                return tokens
        return self._known(matcher, place, budget)

    def inner_closing(self, matcher: Matcher, place: Position, depth: int) -> list[int] | None:
        """Return tokens that end the innermost value and leave `depth` brackets open, or None.

        `matcher` is at `place` and does not advance.
        """
        search = Search(self._vocabulary, self._hints, self._leaves, MAX_EFFORT_INSIDE, by_turns=False)
        way = search.to_depth(PartialText(matcher.deep_copy(), place), MAX_EFFORT_INSIDE, depth)
        return None if way is None else self._spelled(matcher.deep_copy(), way)

    def _known(self, matcher: Matcher, place: Position, budget: int) -> list[int] | None:
        """Return the rest of a stored tool call that begins like the current call, or None if no rest fits
        the budget.
        """
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
        """Convert single-byte tokens to the tokenizer's tokens for the same text. A token that the matcher
        forces takes precedence.

        Returns None if the matcher refuses a token or forces a different text. `matcher` advances.
        """
        texts, out, at, planned = self._vocabulary.token_bytes, list[int](), 0, list[int]()
        while at < len(way):
            if not texts[way[at]]:  # A special token.
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
        """Return the tokenizer's tokens for the text in `way` from index `at`, in reverse order."""
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
