"""The grammar state of one row: the tokens it said, and which matcher has read how many of them.

A draft grammar allows some of what a grammar does and forces more of it, so it knows drafts where the grammar
does not. As long as a text fits one, the draft grammar's matcher alone goes on with it: what a draft grammar
takes, its grammar takes. The grammar's own matcher lags behind, and reads on where a mask is wanted, where
the text departs from the draft grammar, or to say whether it may end.

Drafts are read when they are proposed. Those that are said then need not be read again; the others are rolled
back.
"""

from collections.abc import Callable, Sequence

from mmengine.structured_output.engines.base import Backend, Compiled
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.opening import Opening

DraftGrammars = Sequence[Callable[[], Matcher]]  # what makes a matcher at the beginning, the likeliest first


class Follower:
    """A matcher that has read the first `num_read` tokens of a text, and after these the draft tokens
    `ahead`, which are not said yet."""

    __slots__ = ("matcher", "num_read", "ahead")

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.num_read = 0
        self.ahead: list[int] = []

    def catch_up(self, said: list[int]) -> bool:
        """Read all of the tokens `said`, and no drafts; False, and the matcher is broken from then on, where
        it refuses one."""
        self.keep(())
        behind = said[self.num_read :]
        self.num_read = len(said)
        return not behind or self.matcher.consume_tokens(behind)

    def keep(self, token_ids: Sequence[int]) -> int:
        """Roll back the drafts that were read, but for those with which `token_ids` begin: how many are
        left."""
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
    """`said`: the tokens that the grammar has allowed so far; none while `opening` waits for the tokens
    behind which the grammar begins. `own`: the grammar's matcher, as `compiled` gives them."""

    __slots__ = (
        "said",
        "own",
        "opening",
        "_backend",
        "compiled",
        "_draft_grammars",
        "_num_tried",
        "_guide",
        "_leader",
        "_asks",
    )

    def __init__(
        self,
        backend: Backend,
        compiled: Compiled,
        opening: Opening | None,
        draft_grammars: Callable[[], DraftGrammars | None] | None,
    ):
        """`draft_grammars` gives None while they are being compiled."""
        self.said: list[int] = []
        self.compiled = compiled
        self.own = self._leader = Follower(compiled.matcher())
        self.opening = opening
        self._backend, self._draft_grammars, self._num_tried = backend, draft_grammars, 0
        self._guide: Follower | None = None  # of a draft grammar that the text fits, as far as it was read
        self._asks = False  # whether the row chooses first and asks then, and has no masks

    def go_on_from(self, said: list[int], matcher: Matcher) -> None:
        """All that was said is `said` now, which `matcher`, its grammar's, has read."""
        self.said, self.opening = said, None
        self.own = self._leader = Follower(matcher)
        self.own.num_read = len(said)
        self._guide, self._draft_grammars = None, None

    def matcher(self) -> Matcher:
        """The grammar's own matcher, after it has read all that was said."""
        own = self.own
        if own.ahead or own.num_read < len(self.said):
            own.catch_up(self.said)
        return own.matcher

    def renewed(self) -> Matcher | None:
        """Another matcher of the grammar, its own from now on, where that broke for what all texts of the
        grammar have used up together."""
        matcher = self.compiled.renewed(self.own.matcher.get_error())
        if matcher is None or self.said and not matcher.consume_tokens(self.said):
            return None
        self.own.matcher = matcher
        return matcher

    def open(self, token_ids: list[int]) -> list[int]:
        """Of `token_ids`, which the row said, those that belong to the grammar: behind its opening."""
        if self.opening is None:
            return token_ids
        behind = self.opening.take(token_ids)
        if behind is None:
            return []
        self.opening = None
        return token_ids[behind:]

    def say(self, token_ids: Sequence[int], ends: frozenset[int]) -> tuple[int, bool]:
        """The text goes on by these tokens, until there is one that it may not say or it is complete: how
        many, and whether it is."""
        self._asks = True
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
                if leader is self.own or not take(self._without_guide(), token, last):
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
        """How many of these tokens, none of which is an end, it might say one behind the other."""
        if self.opening is not None:
            behind = self.opening.end_in(token_ids)
            if behind is None:
                return len(token_ids)
            return behind + self.own.matcher.validate_tokens(token_ids[behind:])
        if not self._asks:  # then masks will be asked for from here on
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
        """At most `most` tokens that come next by the draft grammar which it follows, or by its grammar."""
        if self.opening is not None or not most:
            return ()
        leader = self._lead()
        tokens = self._backend.forced(leader.matcher, self._last())[:most]
        if tokens and self._asks:
            leader.ahead = tokens[: leader.matcher.try_consume_tokens(tokens)]
            return leader.ahead[:]
        return tokens

    def forced_behind(self, most: int) -> Sequence[int]:
        """At most `most` tokens that come next behind those that were just said to be allowed."""
        leader = self._leader
        if not leader.ahead or most <= 0:
            return ()
        tokens = self._backend.forced(leader.matcher, leader.ahead[-1])[:most]
        tokens = tokens[: leader.matcher.try_consume_tokens(tokens)] if tokens else tokens
        leader.ahead += tokens
        return tokens

    def _last(self) -> int:
        return self.said[-1] if self.said else -1

    def _up_to_date(self) -> Follower:
        leader = self._leader
        if leader.num_read < len(self.said) and not leader.catch_up(self.said):
            self._without_guide()
        return self._leader

    def _without_guide(self) -> Matcher:
        self._leader = self.own
        return self.matcher()

    def _lead(self) -> Follower:
        """The guide where the text fits it, or the next draft grammar that it fits; else its own."""
        while (guide := self._guide or self._next_guide()) is not None:
            if guide.catch_up(self.said):
                self._leader = self._guide = guide
                return guide
            self._guide = None
        self._without_guide()
        return self.own

    def _next_guide(self) -> Follower | None:
        """Of the next draft grammar, which has read nothing; None where none is left, or compiled yet."""
        draft_grammars = self._draft_grammars() if self._draft_grammars is not None else ()
        if draft_grammars is None:
            return None
        if self._num_tried == len(draft_grammars):
            self._draft_grammars = None
            self._num_tried = 0
            return None
        self._num_tried += 1
        return Follower(draft_grammars[self._num_tried - 1]())

    def _may_end(self, end: int) -> bool:
        allows = self._backend.allows
        if allows(self._leader.matcher, end):
            return True
        return self._leader is not self.own and allows(self._without_guide(), end)

    def _is_over(self) -> bool:
        """Whether the text is complete, or broken, where the matcher that leads has stopped.

        Draft grammars differ from their grammar in the white space within a text: where nothing may follow
        in one, nothing may in the grammar, if the text may end there.
        """
        if self._leader is self.own:
            return True
        own, end = self.own, self._backend.eos_token_ids[0]
        own.keep(())
        behind = self.said[own.num_read :]
        may_end = own.matcher.validate_tokens([*behind, end]) > len(behind)
        if may_end and not self._leader.matcher.is_error():
            return True
        return self._without_guide().is_stopped()
