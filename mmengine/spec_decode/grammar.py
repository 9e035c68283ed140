"""Drafts where a grammar leaves no choice: keys, punctuation, the rest of a word.

One legal token is rare, because a string can be spelled with many; but the string itself is often forced.
Its tokens, as the tokenizer would spell it, are drafts; the last of them is held back, for it might be
spelled together with what comes next.

JSON leaves one choice nearly everywhere, that of white space. So what is asked is not the grammar itself but
draft grammars of it, in which white space is fixed in one of the usual ways, until the row departs from them
(structured_output/rows/row_matcher.py).
"""

from collections.abc import Callable, Sequence

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.texts import Texts


class GrammarDrafter:
    """`forced`: at most so many tokens that come next in a row's grammar; none before that began."""

    name = "grammar"

    def __init__(self, forced: Callable[[int, int], Sequence[int]]):
        self._forced = forced

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        return request.grammar is not None

    def leave(self, row: int, texts: Texts) -> None:
        """Where a row stands in its grammar is not known here."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        drafts = [self._forced(row, room) for row, room in zip(rows.tolist(), most.tolist(), strict=True)]
        flat = [token for each in drafts for token in each]
        if not flat:
            return None
        return Proposed(np.array(flat, np.int32), np.array([len(each) for each in drafts], np.intp))
