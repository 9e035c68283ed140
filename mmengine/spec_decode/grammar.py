"""Drafts the tokens that a grammar forces, such as keys, punctuation, and a word's remaining tokens.

A grammar rarely allows only a single token, because most strings can be tokenized in many ways. But the next
characters are often forced. The drafts are the tokenizer's tokens for these characters. The last token is
left out, because it might merge with the following text.

In JSON, hardly any text is forced, because white space is allowed nearly everywhere. Drafts therefore come
from draft grammars, each with a common white-space style. When a row's text departs from all these styles,
drafts come from the row's own grammar (structured_output/rows/row_matcher.py).
"""

from collections.abc import Callable, Sequence

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.texts import Texts


class GrammarDrafter:
    """Proposes the tokens that a row's grammar forces.

    `forced(row, most)` returns at most `most` forced tokens. Before the grammar starts, `forced` returns no
    tokens.
    """

    name = "grammar"

    def __init__(self, forced: Callable[[int, int], Sequence[int]]):
        self._forced = forced

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        return request.grammar is not None

    def leave(self, row: int, texts: Texts) -> None:
        """Do nothing, because RowMatchers tracks each row's grammar."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        drafts = [self._forced(row, room) for row, room in zip(rows.tolist(), most.tolist(), strict=True)]
        flat = [token for each in drafts for token in each]
        if not flat:
            return None
        return Proposed(np.array(flat, np.int32), np.array([len(each) for each in drafts], np.intp))
