"""Completes a constrained answer before its token budget is used up."""

from collections.abc import Sequence

from mmengine.structured_output.closing.closings import Closings
from mmengine.structured_output.closing.json_position import Position
from mmengine.structured_output.grammar_start import GrammarStart
from mmengine.structured_output.matcher import Matcher

DEEP = 32  # From this number of open brackets on, a completion is derived from the previous completion.
# Maximum number of tokens that a derived completion drops from the previous completion's start.
MAX_DROPPED = 8
# If a derived completion needs over half the budget, the closer searches for a shorter completion every
# RESPELLED_EVERY tokens.
RESPELLED_EVERY = 32


class Closer:
    """Makes sure that a text can be completed within its token budget.

    A completion is a list of tokens that ends the text as the grammar allows. `path`: a completion from the
    current position; None if no completion is known. `path` depends only on the generated tokens, so a row
    that is computed again gets the same completion. `left`: number of tokens that may still be generated.
    `has_closed`: whether a completion replaced a token that the model chose, or used the budget's last
    tokens. After a recovery from a log, `has_closed` does not count earlier replacements. After `cut` or
    `finish`, the completion is generated regardless of the model's choices. `has_repeated`: whether `finish`
    started a completion.
    """

    def __init__(
        self, closings: Closings, path: list[int], ends: Sequence[int], budget: int, reserve: int = 0
    ):
        """Start a text with at most `budget` tokens.

        `path` is the grammar's shortest text. The last `reserve` tokens in the budget can only be used after
        a `cut`. `ends`: the end-of-sequence tokens, which are allowed exactly where the text may end.
        """
        self.path: list[int] | None = path
        self.left, self._reserve = budget - reserve, reserve
        self.has_closed = self.is_cut = self.has_repeated = False
        self._closings, self._ends = closings, ends
        self._place = closings.begin()  # The current position in the text.
        # A token that `choose` tried, and the completion after this token.
        self._next: tuple[int, list[int] | None] = (-1, None)

    def choose(self, matcher: Matcher, token: int) -> int:
        """Return the token to generate after the model chose `token`.

        Returns `token` if a completion exists after `token`. Otherwise returns the next token in the known
        completion. The matcher does not advance.
        """
        if self.is_cut and self.path:
            return self.path[0]
        if token in self._ends or self.path is None:
            return token
        self._next = (token, self._completion_after(self.path, matcher, token))
        if self._next[1] is not None:
            return token
        self.has_closed = True
        return self.path[0] if self.path else self._ends[0]

    def choose_before_start(self, start: GrammarStart, token: int) -> int:
        """Return the token to generate after the model chose `token`, while the grammar has not begun.

        The grammar begins after the tokens in `start`. If the remaining budget only suffices for these tokens
        and a completion, these tokens are forced.
        """
        if self.path is None or (
            not self.is_cut and len(start.missing([token])) + len(self.path) < self.left
        ):
            return token
        self.has_closed = True
        return start.missing([])[0]

    def accept(self, matcher: Matcher, token: int) -> None:
        """Advance by `token`, which the matcher has not consumed yet."""
        if self.path is None:
            return
        if self.path and token == self.path[0] and len(self.path) >= self.left:
            self.has_closed = True
        known, self._next = self._next, (-1, None)
        self.path = known[1] if known[0] == token else self._completion_after(self.path, matcher, token)
        self._place = self._closings.advance(self._place, token)
        self.left -= 1

    def cut(self, matcher: Matcher, token_ids: Sequence[int], behind: str) -> bool:
        """Cut the text after `token_ids` and start its completion. Return whether a completion fits.

        `matcher` must have consumed `token_ids`. `behind`: the text that was generated after these tokens. If
        no new completion fits into the budget, this method tries the uncut text's completion.
        """
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

    def finish(self) -> bool:
        """Start the known completion at the current position. Return whether a completion is known."""
        self.is_cut = self.has_closed = self.has_repeated = self.path is not None
        return self.has_repeated

    def must_end(self, matcher: Matcher) -> bool:
        """Return whether the budget or a cut ends the text here, although the grammar allows more text."""
        is_full = self.left == 0 and not self._closings.is_free(self._place)
        is_full = is_full or (self.is_cut and not self.path)
        ends = is_full and matcher.is_accepting() and not matcher.is_stopped()
        self.has_closed |= ends
        return ends

    def _completion_after(self, path: list[int], matcher: Matcher, token: int) -> list[int] | None:
        """Return a completion after `token` that fits into the remaining budget, or None.

        `path`: the known completion at the position before `token`.
        """
        left = self.left - 1
        if path and token == path[0]:
            return path[1:]
        branch = matcher.deep_copy()
        if not branch.consume_token(token):
            return None
        if len(path) > left:
            return None  # The known completion no longer fits, and a shorter completion may not exist.
        if path and branch.validate_tokens([*path, self._ends[0]]) > len(path):
            return path
        place = self._closings.advance(self._place, token)
        near = self._near_completion(path, branch, place)
        if near is not None and len(near) > left:
            near = None
        if near is not None and (2 * len(near) <= left or left % RESPELLED_EVERY):
            return near
        found = self._closings.closing(branch, place, left)
        return near if found is None else found

    def _near_completion(self, path: list[int], matcher: Matcher, place: Position) -> list[int] | None:
        """Return a completion that ends the innermost value and continues with `path`, or None.

        Used only deep inside nested values, where a complete search would take too long. `matcher` is at
        `place`.
        """
        depth = len(self._place.inside)
        if depth < DEEP:
            return None
        inner = self._closings.inner_closing(matcher, place, depth)
        if inner is None:
            return None
        for start in range(min(MAX_DROPPED, len(path)) + 1):
            whole = [*inner, *path[start:]]
            if matcher.validate_tokens([*whole, self._ends[0]]) > len(whole):
                return whole
        return None
