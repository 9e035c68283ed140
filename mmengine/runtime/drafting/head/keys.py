"""Tracks for which rows and blocks a draft head has all keys and values.

Steps that the head never reads leave gaps in its KV. Drafts after a gap would be poor, so a row with a gap
gets no drafts. A request's first blocks may be prefix hits, or may be swapped in from the host. If the head
has not read these blocks yet, the row gets no drafts before the head has read them, either for the row that
filled them or for this row from copied states (deferred.py).
"""

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.drafting.head.target_states import HeadBatch

KEPT = 64  # number of recorded steps that are processed together


class Keys:
    """Records gaps in the head's KV.

    `whole`: bool [max_rows], whether a row has no gap. Tokens that the head will still read are not a gap.
    `lacking`: row -> unread prefix blocks, int32 [m], for each row that waits for blocks.
    """

    def __init__(self, num_rows: int, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.whole = np.zeros(num_rows, bool)
        self.lacking: dict[int, np.ndarray] = {}
        self._size = block_size
        # For each block, whether the head has read all computed tokens in the block.
        self._known, self._known_on_host = np.zeros(num_blocks, bool), np.zeros(num_host_blocks, bool)
        self._waiting: list[np.ndarray] = []  # slots of steps that the head has not read yet
        # (rows, slots) of steps that the head will never read
        self._skipped: list[tuple[np.ndarray, np.ndarray]] = []

    def defer(self, plan: StepPlan) -> None:
        """Record that the head does not read the step now, but may read it later."""
        self._waiting.append(plan.slot_mapping)
        if len(self._waiting) >= KEPT:
            self.settle()

    def skip(self, plan: StepPlan) -> None:
        """Record that the head will never read the step."""
        self._skipped.append((plan.rows, plan.slot_mapping))
        if len(self._skipped) >= KEPT:
            self.settle()

    def settle(self) -> None:
        """Process all recorded steps."""
        if self._waiting:
            self._known[np.concatenate(self._waiting) // self._size] = False
            self._waiting = []
        if self._skipped:
            rows, slots = zip(*self._skipped, strict=True)
            self.whole[np.concatenate(rows)] = False
            self._known[np.concatenate(slots) // self._size] = False
            self._skipped = []

    def prepare(self, plan: StepPlan) -> None:
        """Update the records for the plan's copied and swapped blocks and for admitted rows."""
        self.settle()
        for sources, targets, pairs in (
            (self._known, self._known_on_host, plan.swap_out),
            (self._known, self._known, plan.copy),
            (self._known_on_host, self._known, plan.swap_in),
        ):
            if pairs is not None:
                targets[pairs[:, 1]] = sources[pairs[:, 0]]
        for admission in plan.admitted:
            place = int(np.flatnonzero(plan.rows == admission.row)[0])
            held = plan.block_table[place, : -(-int(plan.num_computed[place]) // self._size)]
            lacking = held[~self._known[held]]
            self.whole[admission.row] = True
            self.lacking.pop(admission.row, None)
            if len(lacking):
                self.lacking[admission.row] = lacking

    def lacks(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return which of `rows` [n] wait for blocks, bool [n]. `slots`: the slots whose blocks the head
        reads now.
        """
        self.settle()
        found = np.zeros(len(rows), bool)
        read_now = np.unique(slots // self._size)
        for place in [place for place, row in enumerate(rows.tolist()) if row in self.lacking]:
            row = int(rows[place])
            blocks = self.lacking[row]
            blocks = self.lacking[row] = blocks[~self._known[blocks]]
            if np.isin(blocks, read_now).all():
                del self.lacking[row]
            else:
                found[place] = True
        return found

    def mark_written(self, read: HeadBatch) -> None:
        """Record that the head now has the keys for the tokens in `read`."""
        self.settle()
        blocks = read.slots // self._size
        if read.is_all is not None:  # a block is incomplete until all tokens in the block are read
            ends = read.starts + read.counts
            index = counting(read.counts) + np.repeat(read.starts, read.counts)
            is_done = np.repeat(read.is_all, read.counts)
            blocks = blocks[is_done | (index // self._size < np.repeat(ends // self._size, read.counts))]
        self._known[blocks] = True

    def lose(self, rows: np.ndarray) -> None:
        self.settle()
        self.whole[rows] = False
