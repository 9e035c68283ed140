"""The drafter interface. grammar.py, ngram.py and suffix.py implement it.

A draft is a token that may come next. The model computes the draft together with the known tokens, and
accepts it only if the model samples the same token. So a drafter can make an answer faster or slower, but
never change it.
"""

from typing import NamedTuple, Protocol

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.texts import Texts


class Proposed(NamedTuple):
    """Drafts for s rows. `token_ids` (int32 [counts.sum()]) holds the rows' drafts one after another;
    `counts` [s] says how many drafts each row has.
    """

    token_ids: np.ndarray
    counts: np.ndarray


class Drafter(Protocol):
    name: str

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        """Assign `row` to `request`, whose tokens are in `texts`, and forget the row's previous request.

        Returns False if the drafter will not draft for this row.
        """

    def leave(self, row: int, texts: Texts) -> None:
        """Called when another request takes the row, before `admit`, while `texts` still holds the previous
        request.
        """

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        """Propose tokens for s `rows` (intp), at most `most[i]` (intp [s], 0 or more) for row i. Returns None
        if there are no drafts for any row.

        The rows' texts may have grown since the last call.
        """
