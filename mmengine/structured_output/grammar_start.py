"""Detects the start of a grammar that applies only after certain tokens, such as </think>."""

from collections.abc import Sequence


def find_end(token_ids: Sequence[int], after: Sequence[int], start: int = 0) -> int | None:
    """Return the index after the first occurrence of `after` in `token_ids`, or None.

    The search begins at the index `start`. `after` has at least one token.
    """
    size, first = len(after), after[0]
    wanted = list(after)
    while True:
        try:
            start = token_ids.index(first, start)
        except ValueError:
            return None
        if list(token_ids[start : start + size]) == wanted:
            return start + size
        start += 1


class GrammarStart:
    """Waits until the tokens `after` (at least one) are generated in this order without gaps."""

    __slots__ = ("_after", "_last")

    def __init__(self, after: Sequence[int]):
        self._after = list(after)
        self._last: list[int] = []  # The last generated tokens, at most len(after) - 1.

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of `token_ids` would precede the grammar, or None if the grammar would not start.

        Does not consume the tokens.
        """
        end = find_end([*self._last, *token_ids], self._after)
        return None if end is None else end - len(self._last)

    def missing(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must still follow `token_ids` to start the grammar.

        Returns [] if the grammar starts within `token_ids`.
        """
        if self.end_in(token_ids) is not None:
            return []
        text, size = [*self._last, *token_ids], len(self._after) - 1
        while text[max(0, len(text) - size) :] != self._after[:size]:
            size -= 1
        return self._after[size:]

    def take(self, token_ids: Sequence[int]) -> int | None:
        """Consume the tokens, and return the result of `end_in` for these tokens."""
        found = self.end_in(token_ids)
        text = [*self._last, *token_ids]
        self._last = text[max(0, len(text) - len(self._after) + 1) :]
        return found
