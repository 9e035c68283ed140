"""Keeps a row's grammar state: the tokens, and the matchers that have consumed the tokens. A row is a running
request's slot.

A draft grammar allows only some of the texts that the row's grammar allows. A draft grammar therefore forces
more tokens, which become drafts. While the text fits a draft grammar, only the draft grammar's matcher
consumes tokens. The row's own matcher catches up later, for example when a mask is needed.

Matchers consume proposed draft tokens immediately, and roll back rejected draft tokens later.
"""

from collections.abc import Callable, Sequence

from mmengine.structured_output.engines.base import Backend, Compiled
from mmengine.structured_output.grammar_start import GrammarStart
from mmengine.structured_output.matcher import Matcher

# Functions that return a new matcher for a draft grammar, most likely grammar first.
DraftGrammars = Sequence[Callable[[], Matcher]]


class TextMatcher:
    """A matcher and its position in the row's text.

    The matcher has consumed the text's first `num_read` tokens, and then the unverified draft tokens `ahead`.
    """

    __slots__ = ("matcher", "num_read", "ahead")

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.num_read = 0
        self.ahead: list[int] = []

    def catch_up(self, said: list[int]) -> bool:
        """Roll back drafts, and consume the remaining tokens in `said`.

        Returns False if the grammar does not allow a token. The matcher then has an error.
        """
        self.keep(())
        behind = said[self.num_read :]
        self.num_read = len(said)
        return not behind or self.matcher.consume_tokens(behind)

    def keep(self, token_ids: Sequence[int]) -> int:
        """Roll back the drafts after the common prefix with `token_ids`, and return the prefix's length."""
        kept = 0
        for mine, theirs in zip(self.ahead, token_ids):
            if mine != theirs:
                break
            kept += 1
        if kept < len(self.ahead):
            self.matcher.rollback(len(self.ahead) - kept)
            del self.ahead[kept:]
        return kept


class RowMatcher:
    """The grammar state of a row.

    `said` has the row's tokens since the grammar started. `pending_start` detects the tokens that start the
    grammar; None after the start. `own` is the matcher for the grammar `compiled`. In rows without masks,
    new tokens go to `_leader`: a draft grammar's matcher, or `own`.
    """

    __slots__ = (
        "said",
        "own",
        "pending_start",
        "_backend",
        "compiled",
        "_draft_grammars",
        "_num_tried",
        "_draft_matcher",
        "_leader",
        "_is_lazy",
    )

    def __init__(
        self,
        backend: Backend,
        compiled: Compiled,
        grammar_start: GrammarStart | None,
        draft_grammars: Callable[[], DraftGrammars | None] | None,
    ):
        """Start a row. `draft_grammars` returns None while the draft grammars are being compiled."""
        self.said: list[int] = []
        self.compiled = compiled
        self.own = self._leader = TextMatcher(compiled.matcher())
        self.pending_start = grammar_start
        self._backend, self._draft_grammars, self._num_tried = backend, draft_grammars, 0
        # The matcher for a draft grammar that the text has fitted so far.
        self._draft_matcher: TextMatcher | None = None
        self._is_lazy = False  # Whether tokens are checked after sampling, without masks.

    def restart_from(self, said: list[int], matcher: Matcher) -> None:
        """Continue from the tokens `said`. The grammar's matcher `matcher` must already have consumed all
        tokens in `said`.
        """
        self.said, self.pending_start = said, None
        self.own = self._leader = TextMatcher(matcher)
        self.own.num_read = len(said)
        self._draft_matcher, self._draft_grammars = None, None

    def matcher(self) -> Matcher:
        """Return the grammar's own matcher, after making it consume all tokens."""
        own = self.own
        if own.ahead or own.num_read < len(self.said):
            own.catch_up(self.said)
        return own.matcher

    def renew(self) -> Matcher | None:
        """Replace the grammar's own matcher if its error says that a shared resource is exhausted.

        Returns the new matcher, or None after any other error.
        """
        matcher = self.compiled.renew(self.own.matcher.get_error())
        if matcher is None or self.said and not matcher.consume_tokens(self.said):
            return None
        self.own.matcher = matcher
        return matcher

    def open(self, token_ids: list[int]) -> list[int]:
        """Return the tokens in `token_ids` that come after the grammar's start."""
        if self.pending_start is None:
            return token_ids
        behind = self.pending_start.take(token_ids)
        if behind is None:
            return []
        self.pending_start = None
        return token_ids[behind:]

    def consume(self, token_ids: Sequence[int], ends: frozenset[int]) -> tuple[int, bool]:
        """Consume tokens up to the first token that is not allowed, or the end of the text.

        Returns (number of consumed tokens, whether the text is complete).
        """
        self._is_lazy = True
        leader, said, take = self._up_to_date(), self.said, self._backend.take
        known = leader.keep(token_ids)
        if known:
            said += leader.ahead
            leader.ahead, leader.num_read = [], len(said)
            if leader.matcher.is_stopped() and self._is_over():
                return known, True
            leader = self._leader
        for index in range(known, len(token_ids)):
            token, last = token_ids[index], said[-1] if said else -1
            if token in ends:
                if not self._may_end(token):
                    return index, False
                continue
            if not take(leader.matcher, token, last):
                if leader is self.own or not take(self._drop_draft_matcher(), token, last):
                    return index, False
                leader = self.own
            said.append(token)
            leader.num_read += 1
            if leader.matcher.is_stopped():
                if self._is_over():
                    return index + 1, True
                leader = self._leader
        return len(token_ids), False

    def num_allowed(self, token_ids: list[int]) -> int:
        """Return how many leading tokens in `token_ids` the grammar allows. `token_ids` must not include an
        end token.
        """
        if self.pending_start is not None:
            behind = self.pending_start.end_in(token_ids)
            if behind is None:
                return len(token_ids)
            return behind + self.own.matcher.validate_tokens(token_ids[behind:])
        if not self._is_lazy:  # The row uses masks, which need the grammar's own matcher.
            return self.matcher().validate_tokens(token_ids)
        leader = self._up_to_date()
        known = leader.keep(token_ids)
        ahead, take, matcher = leader.ahead, self._backend.take, leader.matcher
        for token in token_ids[known:]:
            if not take(matcher, token, ahead[-1] if ahead else self._last()):
                break
            ahead.append(token)
        return len(ahead)

    def forced(self, most: int) -> Sequence[int]:
        """Return at most `most` forced next tokens, from a fitting draft grammar if possible."""
        if self.pending_start is not None or not most:
            return ()
        leader = self._lead()
        tokens = self._backend.forced(leader.matcher, self._last())[:most]
        if tokens and self._is_lazy:
            leader.ahead = tokens[: leader.matcher.try_consume_tokens(tokens)]
            return leader.ahead[:]
        return tokens

    def forced_after_drafts(self, most: int) -> Sequence[int]:
        """Return at most `most` forced tokens after the drafts that `num_allowed` has just checked."""
        leader = self._leader
        if not leader.ahead or most <= 0:
            return ()
        tokens = self._backend.forced(leader.matcher, leader.ahead[-1])[:most]
        tokens = tokens[: leader.matcher.try_consume_tokens(tokens)] if tokens else tokens
        leader.ahead += tokens
        return tokens

    def _last(self) -> int:
        return self.said[-1] if self.said else -1

    def _up_to_date(self) -> TextMatcher:
        leader = self._leader
        if leader.num_read < len(self.said) and not leader.catch_up(self.said):
            self._drop_draft_matcher()
        return self._leader

    def _drop_draft_matcher(self) -> Matcher:
        self._leader = self.own
        return self.matcher()

    def _lead(self) -> TextMatcher:
        """Return the matcher for the first draft grammar that the text fits, or the grammar's own matcher."""
        while (draft_matcher := self._draft_matcher or self._next_draft_matcher()) is not None:
            if draft_matcher.catch_up(self.said):
                self._leader = self._draft_matcher = draft_matcher
                return draft_matcher
            self._draft_matcher = None
        self._drop_draft_matcher()
        return self.own

    def _next_draft_matcher(self) -> TextMatcher | None:
        """Return a new matcher for the next draft grammar.

        Returns None if no draft grammar is left, or if the draft grammars are not compiled yet.
        """
        draft_grammars = self._draft_grammars() if self._draft_grammars is not None else ()
        if draft_grammars is None:
            return None
        if self._num_tried == len(draft_grammars):
            self._draft_grammars = None
            self._num_tried = 0
            return None
        self._num_tried += 1
        return TextMatcher(draft_grammars[self._num_tried - 1]())

    def _may_end(self, end: int) -> bool:
        allows = self._backend.allows
        if allows(self._leader.matcher, end):
            return True
        return self._leader is not self.own and allows(self._drop_draft_matcher(), end)

    def _is_over(self) -> bool:
        """Return whether the text is complete or invalid, after the matcher `_leader` has stopped.

        A draft grammar restricts only the white space within a text. The text is therefore complete if the
        draft grammar allows no further token and the grammar allows the end.
        """
        if self._leader is self.own:
            return True
        own, end = self.own, self._backend.eos_token_ids[0]
        own.keep(())
        behind = self.said[own.num_read :]
        may_end = own.matcher.validate_tokens([*behind, end]) > len(behind)
        if may_end and not self._leader.matcher.is_error():
            return True
        return self._drop_draft_matcher().is_stopped()
