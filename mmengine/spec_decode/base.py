"""The drafter interface; a file like grammar.py or ngram.py implements it.

A draft is a token that may come next. The model computes the draft together with the known tokens, and
accepts it only if the model samples the same token. So a drafter can make an answer faster or slower, but
never change it.
"""

from typing import NamedTuple, Protocol

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.texts import Texts


class Proposed(NamedTuple):
    """Drafts for s rows, row after row: int32 [counts.sum()], and the number per row, [s]."""

    token_ids: np.ndarray
    counts: np.ndarray


class Drafter(Protocol):
    name: str

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        """Assign `row` to `request`, whose tokens are in `texts`, and forget the row's previous request.

        Return False if the drafter will not draft for this row.
        """

    def leave(self, row: int, texts: Texts) -> None:
        """Called before `admit`, while the row still has its text: another request takes the row."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        """Propose tokens for s `rows` (intp), at most `most` (intp [s], 0 or more) each; None: no drafts for
        any row.

        The rows' texts may have grown since the last call.
        """
