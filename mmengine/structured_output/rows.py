"""Where each running row stands in its grammar.

A projection of the rows' tokens, not state: a row's matcher is made anew from all it has said whenever the
row is given to a request (first, after a preemption, after a crash), and goes on by what is sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmengine.request import Request
from mmengine.structured_output.base import Backend, Compiled, Matcher


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What sampling rows may say next: `bits` uint32 [m, words], as Backend.fill sets them, of the m rows
    `picked` (intp, ascending, into all that sample)."""

    picked: np.ndarray
    bits: np.ndarray


class RowMatchers:
    """`compiled_of`: a request's grammar by its id, None where it is not here."""

    def __init__(self, backend: Backend, compiled_of: Callable[[str], Compiled | None], vocab_size: int):
        self._backend, self._compiled_of = backend, compiled_of
        self._num_words = -(-vocab_size // 32)
        self._matchers: dict[int, Matcher] = {}
        self._missing: set[int] = set()  # rows whose grammar is not here

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> None:
        """`row` is `request`'s now, which has a grammar; int32 `token_ids`: its prompt and all it said."""
        self._matchers.pop(row, None)
        self._missing.discard(row)
        compiled = self._compiled_of(request.request_id)
        if compiled is None:
            self._missing.add(row)
            return
        matcher = self._matchers[row] = compiled.matcher()
        said = token_ids[len(request.prompt_token_ids) :]
        if len(said):
            matcher.consume_tokens(said.tolist())

    def masks(self, rows: np.ndarray, picked: np.ndarray) -> tuple[Masks, dict[int, str]]:
        """Masks of rows[picked], and why some of these (indices into `rows`) can say nothing any more."""
        errors = {
            index: "its grammar is not compiled here"
            for index in picked.tolist()
            if int(rows[index]) in self._missing
        }
        if errors:
            picked = picked[[index not in errors for index in picked.tolist()]]
        matchers = [self._matchers[row] for row in rows[picked].tolist()]
        bits = np.empty((len(picked), self._num_words), np.uint32)
        if len(picked):
            self._backend.fill(matchers, bits)
        errors.update(_broken(matchers, picked))
        return Masks(picked, bits), errors

    def advance(
        self, rows: np.ndarray, picked: np.ndarray, token_ids: np.ndarray
    ) -> tuple[list[int], dict[int, str]]:
        """rows[picked] said token_ids[picked]: which of them (indices into `rows`) are complete, and which
        broke, and why."""
        matchers = [self._matchers[row] for row in rows[picked].tolist()]
        self._backend.advance(matchers, token_ids[picked].tolist())
        errors = _broken(matchers, picked)
        complete = [
            index
            for index, matcher in zip(picked.tolist(), matchers, strict=True)
            if index not in errors and matcher.is_stopped()
        ]
        return complete, errors


def _broken(matchers: Sequence[Matcher], picked: np.ndarray) -> dict[int, str]:
    return {
        index: f"its grammar cannot go on: {' '.join(matcher.get_error().split())[:200]}"
        for index, matcher in zip(picked.tolist(), matchers, strict=True)
        if matcher.is_error()
    }
