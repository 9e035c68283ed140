"""Tracks the KV blocks of layers with a sliding window. A block group is a set of layers that share block
tables. The layers without a window form the first group, which prefix_index.py handles. In every group, a
row's block number n holds the tokens from n * block_size on. In a window group, a row releases the blocks
that no later query reads. All groups take blocks from the same pool.
"""

from collections import deque
from itertools import repeat

import numpy as np

from mmengine.block_groups import log_order
from mmengine.config import EngineConfig
from mmengine.core.state.columns import NEVER
from mmengine.core.state.prefix_index import NO_BLOCK, NO_CONTENT
from mmengine.ragged import counting

_NO_BLOCKS = np.zeros(0, np.int32)
_NO_WINDOW = 2**24  # Longer than any request.


class WindowIndex:
    """Maps a content id of the prefix index to a block in each window group.

    A row's blocks with the same number have the same content id in all groups. `keys`: content * num_groups +
    group for each block, or NO_CONTENT.
    """

    def __init__(self, num_blocks: int, num_groups: int):
        self.num_groups = num_groups
        self.keys = np.full(num_blocks if num_groups else 0, NO_CONTENT, np.int64)
        self._block_of: dict[int, int] = {}

    def find(self, contents: np.ndarray) -> np.ndarray:
        """Return the blocks with these contents, int32 [num_groups, n], or NO_BLOCK. `contents`: int64
        [n].
        """
        keys = contents * self.num_groups + np.arange(self.num_groups)[:, None]
        found = map(self._block_of.get, keys.ravel().tolist(), repeat(NO_BLOCK))
        return np.fromiter(found, np.int32, keys.size).reshape(keys.shape)

    def insert(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        """Record the contents of `blocks`, int32 [num_groups, n]. `contents`: int64 [n]. Ignores entries with
        block 0 or NO_CONTENT, and contents that another block already holds.
        """
        keys = contents * self.num_groups + np.arange(self.num_groups)[:, None]
        known = (blocks != 0) & (contents != NO_CONTENT)
        keys, blocks = keys[known], blocks[known]
        owners = list(map(self._block_of.setdefault, keys.tolist(), blocks.tolist()))
        new = np.array(owners, np.int32) == blocks
        self.keys[blocks[new]] = keys[new]

    def forget(self, blocks: np.ndarray) -> None:
        """Forget these blocks' contents."""
        keys = self.keys[blocks]
        self.keys[blocks] = NO_CONTENT
        deque(map(self._block_of.pop, keys[keys != NO_CONTENT].tolist(), repeat(None)), maxlen=0)

    def forget_contents(self, contents: np.ndarray) -> None:
        """Forget these contents, int64 [n], in all groups."""
        keys = contents[contents != NO_CONTENT] * self.num_groups + np.arange(self.num_groups)[:, None]
        found = [self._block_of.pop(key, 0) for key in keys.ravel().tolist()]
        self.keys[found] = NO_CONTENT

    def clear(self) -> None:
        """Forget all recorded contents."""
        self.keys[:] = NO_CONTENT
        self._block_of.clear()

    def recorded(self) -> np.ndarray:
        """Return the blocks whose content is recorded, in the order for `restore`."""
        return np.flatnonzero(self.keys != NO_CONTENT)

    def restore(self, blocks: np.ndarray, keys: np.ndarray) -> None:
        """Restore these blocks' keys from a snapshot. This index must be empty."""
        self.keys[blocks] = keys
        self._block_of.update(zip(keys.tolist(), blocks.tolist(), strict=True))


class WindowTables:
    """The block tables of all rows for the window groups. Only `evolve` changes them.

    `tables`: int32 [group, row, number], 0 where the row holds no block. `first_held`: int32 [group, row],
    the lowest block number that the row holds; the highest number is equal in all groups. `release_at`: int32
    [row], the number of computed tokens at which the row can next release blocks. `order`: the groups'
    indices in the settings, beginning with the first group. vLLM allocates and frees blocks in the settings'
    order.
    """

    def __init__(self, config: EngineConfig, num_numbers: int):
        order, rows = log_order(config.block_groups), config.num_rows
        self.order = np.array(order, np.intp)
        groups = [config.block_groups[number] for number in order[1:]]
        self.num_groups, self._size = len(groups), config.block_size
        self.windows = np.array([group.window or _NO_WINDOW for group in groups], np.int64)[:, None]
        self.tables = np.zeros((len(groups), rows, num_numbers if groups else 0), np.int32)
        self.first_held = np.zeros((len(groups), rows), np.int32)
        self.release_at = np.full(rows if groups else 0, NEVER, np.int32)

    def first_needed(self, num_computed: np.ndarray | int) -> np.ndarray:
        """Return the first block number in each group that a query at token `num_computed` or later reads,
        int64 [group, n]."""
        return np.maximum(num_computed - self.windows + 1, 0) // self._size

    def fill_row(
        self, row: int, cached: np.ndarray, new: np.ndarray, computed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put an admitted row's blocks into its tables. Returns the first group's blocks as (cached,
        new).

        `cached`: the prefix cache hits, group after group. `new`: as in `deal`. `computed`: number of tokens
        in prefix hits, a multiple of the block size.
        """
        num_hits, first = computed // self._size, self.first_needed(computed)[:, 0]
        place = num_hits
        for group, start in enumerate(first.tolist()):
            end = place + num_hits - start
            self.tables[group, row, start:num_hits] = cached[place:end]
            place = end
        by_group = new.reshape(-1, self.num_groups + 1).T
        self.tables[:, row, num_hits : num_hits + by_group.shape[1]] = by_group[1:]
        self.first_held[:, row] = first
        self._set_release_at(np.array([row]))
        return cached[:num_hits], by_group[0]

    def deal(self, rows: np.ndarray, numbers: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Store the blocks `new` in the tables of all groups. Returns the first group's blocks.

        `rows`, `numbers`: int [n], the row and the block number for each new block. `new`: for each row, a
        block for the first group and then for each window group.
        """
        by_group = new.reshape(-1, self.num_groups + 1).T
        self.tables[:, rows, numbers] = by_group[1:]
        return by_group[0]

    def release(self, rows: np.ndarray, num_computed: np.ndarray) -> np.ndarray:
        """Clear the table entries whose blocks no later query reads. Return these blocks, int32.

        `num_computed`: each row's number of computed tokens, without the tokens that steps in flight compute.
        A block that several rows share is returned several times.
        """
        ripe = num_computed >= self.release_at[rows]
        if not ripe.any():
            return _NO_BLOCKS
        rows, num_computed = rows[ripe], num_computed[ripe]
        held = self.first_held[:, rows]
        counts = np.maximum(self.first_needed(num_computed) - held, 0).ravel()
        groups, places = np.divmod(np.repeat(np.arange(len(counts)), counts), len(rows))
        where = groups, rows[places], counting(counts) + np.repeat(held.ravel(), counts)
        blocks = self.tables[where]
        self.tables[where] = 0
        self.first_held[:, rows] = held + counts.reshape(held.shape)
        self._set_release_at(rows)
        return blocks

    def skipped(self, row: int, num_computed: int) -> list[np.ndarray]:
        """Return the blocks that `release` would take from the row, int32, for each group."""
        first = self.first_needed(num_computed)[:, 0].tolist()
        held = self.first_held[:, row].tolist()
        return [table[row, a:b].copy() for table, a, b in zip(self.tables, held, first, strict=True)]

    def by_group(self, row: int, num_numbers: int) -> list[np.ndarray]:
        """Return the row's blocks, int32, for each group. `num_numbers`: as in `held_by`."""
        held = self.first_held[:, row].tolist()
        return [table[row, first:num_numbers].copy() for table, first in zip(self.tables, held, strict=True)]

    def in_settings_order(self, first: np.ndarray, others: list[np.ndarray]) -> list[np.ndarray]:
        """Return the blocks of each group, in the settings' order. `first`: the first group's blocks.
        `others`: each window group's blocks.
        """
        blocks = [first, *others]
        return [blocks[place] for place in np.argsort(self.order).tolist()]

    def held_by(self, row: int, num_numbers: int) -> np.ndarray:
        """Return the row's blocks, int32, window group after window group. `num_numbers`: number of the row's
        blocks in the first group.
        """
        tables = self.tables[:, row, :num_numbers]
        return tables[np.arange(num_numbers) >= self.first_held[:, row, None]]

    def clear_row(self, row: int, num_numbers: int) -> None:
        """Remove all blocks from the row's tables."""
        self.tables[:, row, :num_numbers] = 0
        self.first_held[:, row], self.release_at[row] = 0, NEVER

    def restore_row(self, row: int, first_held: np.ndarray, blocks: np.ndarray) -> None:
        """Restore a row from a snapshot. `first_held`: [group]. `blocks`: the result of `held_by`."""
        counts = (len(blocks) + int(first_held.sum())) // self.num_groups - first_held
        if counts.min() < 0 or counts.sum() != len(blocks):
            raise ValueError("a row's window blocks do not form one table for each group")
        self.first_held[:, row] = first_held
        groups, numbers = np.repeat(np.arange(self.num_groups), counts), counting(counts)
        self.tables[groups, row, numbers + np.repeat(first_held, counts)] = blocks
        self._set_release_at(np.array([row]))

    def _set_release_at(self, rows: np.ndarray) -> None:
        ends = (self.first_held[:, rows] + 1) * self._size + self.windows - 1
        self.release_at[rows] = ends.min(axis=0)
