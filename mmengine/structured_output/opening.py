"""Where a grammar begins that waits for the end of something else, such as a model's reasoning."""

from collections.abc import Sequence


def end_of(token_ids: Sequence[int], after: Sequence[int], start: int = 0) -> int | None:
    """Where the first run of `after`, at least one token, that lies in `token_ids` from `start` on ends; None
    where there is none."""
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


class Opening:
    """Waits for the tokens `after`, at least one, one behind the other."""

    __slots__ = ("_after", "_last")

    def __init__(self, after: Sequence[int]):
        self._after = list(after)
        self._last: list[int] = []  # said, fewer than there are in `after`

    def end_in(self, token_ids: Sequence[int]) -> int | None:
        """If `token_ids` were said: how many of them until it opens, None when it stays closed."""
        end = end_of([*self._last, *token_ids], self._after)
        return None if end is None else end - len(self._last)

    def missing(self, token_ids: Sequence[int]) -> list[int]:
        """If `token_ids` were said: what would have to follow until it opens, none of it if it did."""
        if self.end_in(token_ids) is not None:
            return []
        text, size = [*self._last, *token_ids], len(self._after) - 1
        while text[max(0, len(text) - size) :] != self._after[:size]:
            size -= 1
        return self._after[size:]

    def take(self, token_ids: Sequence[int]) -> int | None:
        """`end_in`, and they are said."""
        found = self.end_in(token_ids)
        text = [*self._last, *token_ids]
        self._last = text[max(0, len(text) - len(self._after) + 1) :]
        return found
