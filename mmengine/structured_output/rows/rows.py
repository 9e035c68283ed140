"""Tracks the grammar state of all rows, and computes token masks. A row is a running request's slot. The log
does not store grammar states. When a request is admitted, even after a preemption or a crash, a new matcher
consumes all generated tokens. A grammar may start after certain tokens, such as the marker that ends
reasoning. Before the start, a row may generate any token except an end of sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from mmengine.request import Request
from mmengine.structured_output.closing.closer import Closer
from mmengine.structured_output.engines.base import Backend, Compiled
from mmengine.structured_output.engines.engine_errors import describe_error
from mmengine.structured_output.grammar_start import GrammarStart, find_end
from mmengine.structured_output.matcher import Matcher
from mmengine.structured_output.rows.row_matcher import DraftGrammars, RowMatcher

NOT_COMPILED = "its grammar is not compiled on this worker"


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Token masks for m sampling positions. `selected`: the positions' indices (intp, ascending). `bits`:
    uint32 [m, words], in the format of Backend.fill.
    """

    selected: np.ndarray
    bits: np.ndarray
    closing: "Closing | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Closing:
    """The sampling positions of texts that must be completed within a token budget. `places`: the positions'
    indices (intp, ascending). `keep`: maps sampled tokens to the tokens to generate.
    """

    places: np.ndarray
    keep: Callable[[list[int]], list[int]]


class Cut(NamedTuple):
    """A text that a stop string ended. `token_ids`: the answer's tokens up to the token that completes the
    stop string. `behind`: the stop string and the text after it.
    """

    token_ids: tuple[int, ...]
    behind: str


class RowMatchers:
    """The matchers for a batch's rows. `compiled_of`: returns a request's grammar, or None for an unknown
    request. `closer_of`: returns a Closer, which completes a text within its token budget, or None.
    `draft_grammars_of`: returns a request's draft grammars (row_matcher.py), or None during their
    compilation.
    """

    def __init__(
        self,
        backend: Backend,
        compiled_of: Callable[[str], Compiled | None],
        vocab_size: int,
        closer_of: Callable[[str], Closer | None] = lambda request_id: None,
        draft_grammars_of: Callable[[Request], DraftGrammars | None] = lambda request: (),
    ):
        self._backend, self._compiled_of, self._closer_of = backend, compiled_of, closer_of
        self._draft_grammars_of = draft_grammars_of
        self._num_words = -(-vocab_size // 32)
        self._rows: dict[int, RowMatcher] = {}  # Grammar state by row, if the grammar is known.
        self._ends = frozenset(backend.eos_token_ids)
        self.closers: dict[int, Closer] = {}
        self._no_end = _mask_without(backend.eos_token_ids, self._num_words)

    def admit(
        self,
        row: int,
        request: Request,
        token_ids: np.ndarray,
        cut: Cut | None = None,
        has_repeated: bool = False,
    ) -> None:
        """Assign `row` to `request`, which has a grammar. `token_ids` (int32): the prompt and all generated
        tokens. `cut`: where a stop string ended the text. `has_repeated`: whether the text is being completed
        because of a repetition.
        """
        self._rows.pop(row, None)
        self.closers.pop(row, None)
        compiled = self._compiled_of(request.request_id)
        if compiled is None:
            return
        grammar_start = GrammarStart(compiled.after) if compiled.after else None
        draft_grammars = partial(self._draft_grammars_of, request)
        row_matcher = self._rows[row] = RowMatcher(self._backend, compiled, grammar_start, draft_grammars)
        whole = token_ids[len(request.prompt_token_ids) :].tolist()
        before = len(whole) if cut is None else len(cut.token_ids)
        said = row_matcher.open(whole[:before])
        closer = self._closer_of(request.request_id)
        if closer is None:
            row_matcher.said = said
            return
        self.closers[row] = closer
        closer.left -= before - len(said)
        self._consume_closing(row, said)
        if cut is not None:
            self._close_cut(row, cut)
            self._consume_closing(row, whole[before:])
        if has_repeated:
            closer.finish()

    def _consume_closing(self, row: int, token_ids: Sequence[int]) -> None:
        row_matcher, closer = self._rows[row], self.closers[row]
        for token in token_ids:
            closer.accept(row_matcher.matcher(), token)
            row_matcher.said.append(token)

    def close(self, row: int) -> bool | None:
        """End a row's text at its last token. Return whether the text is complete, or None if the row must
        generate more tokens to complete the text.
        """
        if row not in self._rows:
            return False
        row_matcher, closer = self._rows[row], self.closers.get(row)
        if closer is not None and (closer.is_cut or (closer.path and closer.finish())):
            return None
        return row_matcher.pending_start is None and row_matcher.matcher().is_accepting()

    def cut(self, row: int, cut: Cut) -> bool | None:
        """End a row's text before a stop string in the newest tokens, which no matcher has consumed. Return
        whether the remaining text is complete, or None if the row must generate more tokens to complete it.
        """
        if row not in self._rows:
            return False
        found = self._before(row, cut)
        if found is not None and found[1].is_accepting():
            return True
        if found is None or row not in self.closers:
            return False
        # Rows with a closer have no drafts, so only the last token is new.
        self._consume_closing(row, cut.token_ids[-1:])
        return None if self._close_cut(row, cut) else False

    def _close_cut(self, row: int, cut: Cut) -> bool:
        """Continue the row before the stop string. Return False if the text cannot be completed within its
        budget.
        """
        found = self._before(row, cut)
        if found is None or not self.closers[row].cut(found[1], found[0], cut.behind):
            return False
        self._rows[row].restart_from(*found)
        return True

    def _before(self, row: int, cut: Cut) -> tuple[list[int], Matcher] | None:
        """Return the text's tokens before the stop string, and a matcher after these tokens."""
        compiled = self._rows[row].compiled
        start = find_end(cut.token_ids, compiled.after) if compiled.after else 0
        if start is None:
            return None
        said, matcher = self._backend.cut(cut.token_ids[start:], cut.behind), compiled.matcher()
        if said is None or (said and not matcher.consume_tokens(said)):
            return None
        return said, matcher

    def said(self, row: int) -> list[int] | None:
        """Return the tokens since the grammar's start, or None before the start."""
        row_matcher = self._rows[row]
        return None if row_matcher.pending_start is not None else row_matcher.said

    def masks(
        self, rows: Sequence[int], drafts: Sequence[list[int]] | None = None
    ) -> tuple[np.ndarray, dict[int, str]]:
        """Return the rows' token masks (uint32 [m, words]), and errors by index in `rows`. With `drafts`, a
        row has a further mask for each draft token, with the tokens that may follow the draft token. After a
        disallowed draft token, the mask allows no token.
        """
        if drafts is None:
            bits = np.empty((len(rows), self._num_words), np.uint32)
        else:
            bits = np.zeros((len(rows) + sum(map(len, drafts)), self._num_words), np.uint32)
        matchers = []
        for row in rows:
            row_matcher = self._rows.get(row)
            if row_matcher is None or row_matcher.pending_start is not None:
                return bits, self._fill_each(rows, bits, drafts)
            matchers.append(row_matcher.matcher())
        self._backend.fill(matchers, bits, drafts)
        errors = _errors_of(matchers)
        for index in list(errors):
            start = index + sum(len(ahead) for ahead in (drafts or ())[:index])
            ahead = drafts[index] if drafts is not None else []
            errors[index] = self._refill(self._rows[rows[index]], bits[start : start + 1 + len(ahead)], ahead)
        return bits, {index: error for index, error in errors.items() if error}

    def _refill(self, row_matcher: RowMatcher, bits: np.ndarray, ahead: list[int]) -> str:
        """Compute a row's masks with a new matcher after an error. Return the remaining error, or ""."""
        matcher = row_matcher.renew()
        if matcher is None:
            return _error_of(row_matcher.own.matcher)
        self._backend.fill([matcher], bits, [ahead] if ahead else None)
        return _error_of(matcher)

    def _fill_each(
        self, rows: Sequence[int], bits: np.ndarray, drafts: Sequence[list[int]] | None
    ) -> dict[int, str]:
        """Compute masks row by row. Needed if some grammars have not started or are unknown. Return the
        errors by index.
        """
        errors, start = {}, 0
        for index, row in enumerate(rows):
            row_matcher = self._rows.get(row)
            ahead = drafts[index] if drafts is not None else []
            stop = start + 1 + len(ahead)
            if row_matcher is None:
                errors[index] = NOT_COMPILED
                bits[start:stop] = 0
                start = stop
                continue
            matcher = row_matcher.matcher()
            if row_matcher.pending_start is not None:
                behind = row_matcher.pending_start.end_in(ahead)
                free = stop if behind is None else start + behind
                bits[start:free] = self._no_end
                start, ahead = free, ahead[behind:] if behind is not None else []
            if start < stop:
                self._backend.fill([matcher], bits[start:stop], [ahead] if ahead else None)
            if matcher.is_error():
                errors[index] = self._refill(row_matcher, bits[start:stop], ahead)
            start = stop
        return {index: error for index, error in errors.items() if error}

    def num_allowed(self, row: int, drafts: list[int]) -> int:
        """Return how many of `drafts` the grammar allows in sequence, up to an end of sequence."""
        ends = [place for place, token in enumerate(drafts) if token in self._ends]
        drafts = drafts[: ends[0]] if ends else drafts
        row_matcher = self._rows.get(row)
        return len(drafts) if row_matcher is None else row_matcher.num_allowed(drafts)

    def forced(self, row: int, most: int) -> Sequence[int]:
        """Return the next forced tokens of the row's grammar or draft grammar, at most `most`."""
        row_matcher = self._rows.get(row)
        return () if row_matcher is None else row_matcher.forced(most)

    def forced_after_drafts(self, row: int, most: int) -> Sequence[int]:
        """Return the forced tokens after the drafts of the last `num_allowed` call."""
        row_matcher = self._rows.get(row)
        return () if row_matcher is None else row_matcher.forced_after_drafts(most)

    def consume_run(self, row: int, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Consume tokens up to a disallowed token or the text's end. Return (number of consumed tokens,
        whether the text is complete).
        """
        row_matcher = self._rows.get(row)
        if row_matcher is None:
            return 0, False
        if row_matcher.pending_start is None:
            return row_matcher.consume(token_ids, self._ends)
        first = self._consume_reasoning(row_matcher, token_ids)
        if row_matcher.pending_start is not None or row_matcher.own.matcher.is_stopped():
            return first, row_matcher.pending_start is None
        num_said, is_complete = row_matcher.consume(token_ids[first:], self._ends)
        return first + num_said, is_complete

    def _consume_reasoning(self, row_matcher: RowMatcher, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the grammar's start, or until an end of sequence. Return the number of
        consumed tokens.
        """
        for index, token in enumerate(token_ids):
            if token in self._ends:
                return index
            row_matcher.open([token])
            if row_matcher.pending_start is None:
                return index + 1
        return len(token_ids)

    def error_of(self, row: int) -> str:
        """Return why the row cannot continue in its grammar, or ""."""
        return _error_of(self._rows[row].own.matcher)

    def closing(self, places: np.ndarray, rows: Sequence[int]) -> Closing | None:
        """Return the sampling positions of rows with a closer, or None without such rows. `places`: each
        row's sampling position.
        """
        selected = [index for index, row in enumerate(rows) if row in self.closers]
        return (
            Closing(places[selected], partial(self._keep, [rows[n] for n in selected])) if selected else None
        )

    def _keep(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the tokens to generate instead of the sampled `tokens`. A negative token means that the row
        sampled nothing, and is returned unchanged.
        """
        kept = list(tokens)
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            closer, row_matcher = self.closers[row], self._rows[row]
            if token >= 0 and row_matcher.pending_start is not None:
                kept[index] = closer.choose_before_start(row_matcher.pending_start, token)
            elif token >= 0:
                kept[index] = closer.choose(row_matcher.matcher(), token)
        return kept

    def advance(
        self, rows: Sequence[int], said: Sequence[list[int]]
    ) -> tuple[dict[int, int], dict[int, str]]:
        """Advance each row by its generated tokens, at least one. Return two dicts by index in `rows`. The
        first dict has an entry for each complete text: the number of its new tokens up to the end. The second
        dict has each error's reason.
        """
        row_matchers = [self._rows[row] for row in rows]
        before = self._open(row_matchers, said)
        if before is not None:
            said = [tokens[first:] for first, tokens in zip(before, said, strict=True)]
        matchers, alone = [], True  # Whether each row generated a single token.
        for row_matcher, tokens in zip(row_matchers, said, strict=True):
            matchers.append(row_matcher.matcher())
            row_matcher.said += tokens
            row_matcher.own.num_read += len(tokens)
            alone = alone and len(tokens) == 1
        if self.closers:
            self._advance_closers(rows, matchers, said, before)
        used = None
        if alone:
            self._backend.advance(matchers, [tokens[0] for tokens in said])
        else:
            used = [each.try_consume_tokens(tokens) for each, tokens in zip(matchers, said, strict=True)]
        errors, complete = _errors_of(matchers), {}
        for index in list(errors):
            renewed = row_matchers[index].renew()
            if renewed is not None:
                matchers[index] = renewed
                del errors[index]
                if used is not None:
                    used[index] = len(said[index])
        for index, matcher in enumerate(matchers):
            stopped = matcher.is_stopped() or (self.closers and self._is_full(rows[index], matcher))
            count = len(said[index]) if used is None else used[index]
            if stopped and index not in errors and row_matchers[index].pending_start is None:
                complete[index] = count if before is None else before[index] + count
            elif count < len(said[index]):
                errors.setdefault(index, "its grammar does not allow the generated tokens")
        return complete, errors

    def _open(self, row_matchers: Sequence[RowMatcher], said: Sequence[list[int]]) -> list[int] | None:
        """Return each row's number of tokens before the grammar's start, or None if all grammars have
        started.
        """
        for row_matcher in row_matchers:
            if row_matcher.pending_start is not None:
                return [len(all_of) - len(each.open(all_of)) for each, all_of in zip(row_matchers, said)]
        return None

    def _advance_closers(
        self,
        rows: Sequence[int],
        matchers: Sequence[Matcher],
        said: Sequence[list[int]],
        before: list[int] | None,
    ) -> None:
        for index, row in enumerate(rows):
            if row in self.closers:
                self.closers[row].left -= 0 if before is None else before[index]
                for token in said[index]:  # A single token, because rows with a closer have no drafts.
                    self.closers[row].accept(matchers[index], token)

    def _is_full(self, row: int, matcher: Matcher) -> bool:
        return row in self.closers and self.closers[row].must_end(matcher)


def _mask_without(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    bits = np.full(num_words, 0xFFFFFFFF, np.uint32)
    for token in token_ids:
        if token // 32 < num_words:
            bits[token // 32] &= ~np.uint32(1 << token % 32)
    return bits


def _errors_of(matchers: Sequence[Matcher]) -> dict[int, str]:
    return {index: _error_of(matcher) for index, matcher in enumerate(matchers) if matcher.is_error()}


def _error_of(matcher: Matcher) -> str:
    if not matcher.is_error():
        return ""
    return f"its grammar cannot continue: {describe_error(matcher.get_error())}"
