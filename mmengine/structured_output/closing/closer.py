"""An answer that is completed where its budget ends."""

from collections.abc import Sequence

from mmengine.structured_output.closing.closing import Closings
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.opening import Opening


class Closer:
    """Keeps one text such that it can still be completed within its budget.

    `path`: the tokens of a closing from where the text is now; None once none is known. It follows from the
    tokens that were said alone, so a row that is computed again, after a preemption or a crash, closes alike.
    `left`: tokens that may still be said. `has_closed`: whether a closing changed what the model said, or was
    said where it took all that was left: who goes on with tokens of somebody else knows no more of them than
    that. Behind a `cut` it says the closing, whatever the model does.
    """

    def __init__(
        self, closings: Closings, path: list[int], ends: Sequence[int], budget: int, reserve: int = 0
    ):
        """At the beginning of a text of at most `budget` tokens, of which `reserve` are kept for what
        completes it behind a `cut`. `ends`: those that are allowed exactly where it may end."""
        self.path: list[int] | None = path
        self.left, self._reserve = budget - reserve, reserve
        self.has_closed = self.is_cut = False
        self._closings, self._ends = closings, ends
        self._place = closings.begin()  # where the text is now
        self._next: tuple[int, list[int] | None] = (-1, None)  # a token, and the closing behind it

    def keep(self, matcher: Matcher, token: int) -> int:
        """What to say where the model said `token`: that, or what the known closing says where none was
        found behind it. The matcher stays where it is."""
        if self.is_cut and self.path:
            return self.path[0]
        if token in self._ends or self.path is None:
            return token
        self._next = (token, self._behind(self.path, matcher, token))
        if self._next[1] is not None:
            return token
        self.has_closed = True
        return self.path[0] if self.path else self._ends[0]

    def keep_before(self, opening: Opening, token: int) -> int:
        """What `keep` gives where the grammar has not begun, and waits for `opening`."""
        if self.path is None or len(opening.missing([token])) + len(self.path) < self.left:
            return token
        self.has_closed = True
        return opening.missing([])[0]

    def said(self, matcher: Matcher, token: int) -> None:
        """The text goes on by `token`, which the matcher is yet to consume."""
        if self.path is None:
            return
        if self.path and token == self.path[0] and len(self.path) >= self.left:
            self.has_closed = True
        known, self._next = self._next, (-1, None)
        self.path = known[1] if known[0] == token else self._behind(self.path, matcher, token)
        self._place = self._closings.advance(self._place, token)
        self.left -= 1

    def cut(self, matcher: Matcher, token_ids: Sequence[int], behind: str) -> bool:
        """The text is cut behind `token_ids`, where `matcher` is, and to be completed, though `behind` was
        said as well: whether there is a closing for which enough is left. That of the text that was said has
        to do where no other is found."""
        self.left, self._reserve = self.left + self._reserve, 0
        self._place, known = self._closings.begin(), self.path
        for token in token_ids:
            self._place = self._closings.advance(self._place, token)
        self._next = (-1, None)
        self.path = self._closings.closing(matcher, self._place, self.left)
        letters = self._closings.letters(behind)
        if self.path is None and known is not None and letters is not None:
            again = [*letters, *known]
            fits = len(again) <= self.left and matcher.validate_tokens(again) == len(again)
            self.path = again if fits else None
        self.is_cut = self.has_closed = self.path is not None
        return self.is_cut

    def ends(self, matcher: Matcher) -> bool:
        """Whether the text ends here because the budget does, or as it was cut, though more could follow."""
        is_full = self.left == 0 and not self._closings.is_free(self._place)
        is_full = is_full or (self.is_cut and not self.path)
        ends = is_full and matcher.is_accepting() and not matcher.is_stopped()
        self.has_closed |= ends
        return ends

    def _behind(self, path: list[int], matcher: Matcher, token: int) -> list[int] | None:
        """A closing behind `token`, of no more tokens than are left then. `path`: that of where the text
        stands."""
        left = self.left - 1
        if path and token == path[0]:
            return path[1:]
        branch = matcher.deep_copy()
        if not branch.consume_token(token):
            return None
        if len(path) > left:
            return None  # only that path leads to an end in time, as far as is known
        if path and branch.validate_tokens([*path, self._ends[0]]) > len(path):
            return path
        return self._closings.closing(branch, self._closings.advance(self._place, token), left)
