"""The interface for drafters, which propose tokens for speculative decoding.

A row is a running request's slot in the batch.

A draft is a token that a drafter proposes as the next token. The model verifies drafts in the same forward
pass as the known tokens. A draft is accepted only if the model samples the same token. A drafter can
therefore never change an answer.
"""

from typing import NamedTuple, Protocol

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.texts import Texts


class Proposed(NamedTuple):
    """Drafts for s rows.

    `token_ids`: int32 [counts.sum()], the rows' drafts one after another. `counts`: [s], each row's number of
    drafts.
    """

    token_ids: np.ndarray
    counts: np.ndarray


def within_vocabulary(token_ids: np.ndarray, counts: np.ndarray, vocab_size: int) -> Proposed:
    """Cut each row's drafts before the first token that has no logit. A prompt has such tokens if the model
    has no logits for media placeholders. For the arguments, see Proposed.
    """
    if not len(token_ids) or token_ids.max() < vocab_size:
        return Proposed(token_ids, counts)
    owners = np.repeat(np.arange(len(counts)), counts)
    beyond = np.cumsum(token_ids >= vocab_size)
    starts = np.cumsum(counts) - counts
    before = np.concatenate(([0], beyond))[starts]  # tokens without logits before each row's drafts
    kept = beyond == before[owners]
    return Proposed(token_ids[kept], np.bincount(owners[kept], minlength=len(counts)))


class Drafter(Protocol):
    """Proposes drafts. A class that copies prompt tokens sets the attribute `copies_text` to True. Its drafts
    are then cut before tokens without logits.
    """

    name: str

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        """Assign `row` to `request`, whose tokens are in `texts`.

        The drafter forgets the row's previous request. Returns False if the drafter will not draft for this
        row.
        """

    def leave(self, row: int, texts: Texts) -> None:
        """Finish the request in `row`. Called before `admit` when the row is reassigned.

        `texts` still has the finished request's tokens.
        """

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        """Propose tokens for `rows` (intp [s]). The row `rows[i]` gets at most `most[i]` tokens (`most`: intp
        [s], 0 or more).

        Returns None if no row has drafts.

        The rows' texts may have grown since the last call.
        """
