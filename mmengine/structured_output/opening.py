"""Where a grammar begins that waits for the end of something else, such as a model's reasoning."""

from collections.abc import Sequence


class Opening:
    """Waits for the tokens `after`, at least one, one behind the other."""

    __slots__ = ("_after", "_last")

    def __init__(self, after: Sequence[int]):
        self._after = list(after)
        self._last: list[int] = []  # said, fewer than there are in `after`

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """If `token_ids` were said: how many of them until it opens, None when it stays closed."""
        size = len(self._after)
        text = [*self._last, *token_ids]
        for end in range(max(size, len(self._last) + 1), len(text) + 1):
            if text[end - size : end] == self._after:
                return end - len(self._last)
        return None

    def take(self, token_ids: Sequence[int]) -> int | None:
        """`end_in`, and they are said."""
        found = self.end_in(token_ids)
        text = [*self._last, *token_ids]
        self._last = text[max(0, len(text) - len(self._after) + 1) :]
        return found
