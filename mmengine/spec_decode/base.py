"""What a drafter brings: one file like grammar.py implements this.

A draft is a token that may come next. It is computed together with what is known, and kept only where the
model says the same; so a drafter can make an answer faster or slower, but never another one.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmengine.request import Request

NO_DRAFTS: tuple[int, ...] = ()


class Drafter(Protocol):
    name: str

    def admit(self, row: int, request: Request, token_ids: np.ndarray) -> bool:
        """`row` is `request`'s now; int32 `token_ids`: its prompt and all it said so far. What is known of
        the request that had the row before is void. False: it wants to hear no more of this row."""

    def propose(
        self, rows: Sequence[int], said: Sequence[Sequence[int]], most: Sequence[int]
    ) -> list[Sequence[int]]:
        """What s rows may say next, at most `most` tokens (0 or more) of each. `said`: what each said since
        it was admitted or asked for last. A row in which nothing is to be guessed gets no drafts."""
