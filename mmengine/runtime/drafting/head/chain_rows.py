"""Describes the rows of a draft chain, and the KV slots to which their drafts are written."""

import msgspec
import numpy as np

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionMeta


class ChainRows(msgspec.Struct, frozen=True, eq=False):
    """n rows whose tokens the head has read, with the number of drafts for each row.

    The drafts' KV is written after the first `kv_lens` tokens. This KV is provisional: the slots are written
    again when the accepted drafts are known.
    """

    most: np.ndarray  # int32 [n], number of drafts for each row, 0 or more
    kv_lens: np.ndarray  # int32 [n], number of tokens of each row in the head's KV pool
    positions: np.ndarray  # int32 [n], rotary position (on all axes) of the token after kv_lens tokens
    # int32 [n, b], with blocks for kv_lens + most - 1 tokens. The row stride may exceed b.
    table: np.ndarray
    # int64 [n, max(most) or more], each row's drafts from other drafters. NO_DRAFT: the head chooses this
    # draft. None: the head chooses all drafts.
    given: np.ndarray | None = None

    def check(self, block_size: int) -> None:
        """Raise ValueError if a draft would be written to a block that its row does not have."""
        room = self.table.shape[1] * block_size
        if not len(self.most) or int(self.kv_lens.max()) + int(self.most.max()) - 1 <= room:
            return
        last = self.kv_lens.astype(np.int64) + np.maximum(self.most - 1, 0)
        if int(last.max()) > room:
            raise ValueError(
                f"drafts up to token {int(last.max())} need more than {self.table.shape[1]} blocks a row"
            )

    def meta(self, ahead: int, active: int, block_size: int) -> AttentionMeta:
        """Return the metadata for the pass that reads draft number `ahead` (from 0) in the first `active`
        rows.
        """
        at = self.kv_lens[:active] + np.int32(ahead)
        blocks = self.table[np.arange(active), at // block_size].astype(np.int64)
        slots = blocks * block_size + at % block_size
        return AttentionMeta(np.ones(active, np.int32), at + np.int32(1), slots, self.table[:active])

    def longest_first(self) -> tuple["ChainRows", np.ndarray]:
        """Return the rows that get drafts, by descending `most`, and their indices in this object."""
        order = np.argsort(-self.most, kind="stable")
        order = order[: int(np.count_nonzero(self.most))]
        columns = (self.most[order], self.kv_lens[order], self.positions[order], self.table[order])
        return ChainRows(*columns, None if self.given is None else self.given[order]), order

    def drafts(self) -> np.ndarray:
        """Return `given` as int64 [max(most), n], with NO_DRAFT where the head chooses the draft."""
        longest = int(self.most.max())
        if self.given is None:
            return np.full((longest, len(self.most)), NO_DRAFT, np.int64)
        return np.ascontiguousarray(self.given[:, :longest].T)
