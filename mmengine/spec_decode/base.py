"""What a drafter brings: one file like grammar.py or ngram.py implements this.

A draft is a token that may come next. It is computed together with what is known, and kept only where the
model says the same; so a drafter can make an answer faster or slower, but never another one.
"""

from typing import NamedTuple, Protocol

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.texts import Texts


class Proposed(NamedTuple):
    """Drafts of s rows, one row after the other: int32 [counts.sum()], and how many each has, [s]."""

    token_ids: np.ndarray
    counts: np.ndarray


class Drafter(Protocol):
    name: str

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        """`row` is `request`'s now, and holds all it said so far. What is known of the request that had the
        row before is void. False: nothing shall be asked about this row."""

    def leave(self, row: int, texts: Texts) -> None:
        """Before `admit`: the row, whose text still stands, is given to another request."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        """What s `rows` (intp), whose texts may be longer than they were, may say next: at most `most` (intp
        [s], 0 or more) tokens of each. None: nothing of any."""
