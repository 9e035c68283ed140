"""The rows that a chain of drafts goes on with, and where their drafts stand in the cache."""

import msgspec
import numpy as np

from mmengine.core.executor import NO_DRAFT
from mmengine.runtime.attention.base import AttentionMeta


class ChainRows(msgspec.Struct, frozen=True, eq=False):
    """Rows whose last token has passed the head. What drafts leave in the cache behind `kv_lens` is
    provisional: the same slots are written again when the target has decided."""

    most: np.ndarray  # int32 [n], drafts that a row may have, 0 or more
    kv_lens: np.ndarray  # int32 [n], tokens of each row in the head's cache
    positions: np.ndarray  # int32 [n], where the first token behind them stands, in all three rows
    # int32 [n, b], with the blocks of kv_lens + most - 1 tokens; rows may lie further apart than b.
    table: np.ndarray
    # int64 [n, max(most) or more], tokens of others that stand first among a row's drafts, NO_DRAFT
    # behind them, where the head chooses; None: of no row.
    given: np.ndarray | None = None

    def check(self, block_size: int) -> None:
        """ValueError where a draft would be written to a block that the row does not have."""
        room = self.table.shape[1] * block_size
        if not len(self.most) or int(self.kv_lens.max()) + int(self.most.max()) - 1 <= room:
            return
        last = self.kv_lens.astype(np.int64) + np.maximum(self.most - 1, 0)
        if int(last.max()) > room:
            raise ValueError(
                f"drafts up to token {int(last.max())} need more than {self.table.shape[1]} blocks a row"
            )

    def meta(self, ahead: int, active: int, block_size: int) -> AttentionMeta:
        """Of the pass that puts one token of each of the first `active` rows behind `ahead` others."""
        at = self.kv_lens[:active] + np.int32(ahead)
        blocks = self.table[np.arange(active), at // block_size].astype(np.int64)
        slots = blocks * block_size + at % block_size
        return AttentionMeta(np.ones(active, np.int32), at + np.int32(1), slots, self.table[:active])

    def longest_first(self) -> tuple["ChainRows", np.ndarray]:
        """The rows that draft, those that may draft most first, and their indices here."""
        order = np.argsort(-self.most, kind="stable")
        order = order[: int(np.count_nonzero(self.most))]
        columns = (self.most[order], self.kv_lens[order], self.positions[order], self.table[order])
        return ChainRows(*columns, None if self.given is None else self.given[order]), order

    def drafts(self) -> np.ndarray:
        """int64 [max(most), n]: those that are given, NO_DRAFT where the head chooses."""
        longest = int(self.most.max())
        if self.given is None:
            return np.full((longest, len(self.most)), NO_DRAFT, np.int64)
        return np.ascontiguousarray(self.given[:, :longest].T)
