"""Of which rows and blocks a head has all keys and values.

Where it reads nothing for a while, there are gaps. Drafts behind a gap would be poor, so a row with one has
none. Blocks with which a row begins, found by their content or swapped in, may have gaps too, or be another
row's to be read: it waits for these.
"""

import numpy as np

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.drafting.eagle3.target_states import HeadBatch

KEPT = 64  # steps that are looked at together


class Keys:
    """`whole` bool [max_rows]: rows without a gap, but for tokens that wait to be read. `lacking`, by row:
    the blocks with which it began that were not known then, int32 [m]."""

    def __init__(self, num_rows: int, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.whole = np.zeros(num_rows, bool)
        self.lacking: dict[int, np.ndarray] = {}
        self._size = block_size
        # Blocks of which every token that was computed was read too.
        self._known, self._known_on_host = np.zeros(num_blocks, bool), np.zeros(num_host_blocks, bool)
        self._waiting: list[np.ndarray] = []  # slots of steps that were not read yet
        self._skipped: list[tuple[np.ndarray, np.ndarray]] = []  # rows and slots of those that never will be

    def defer(self, plan: StepPlan) -> None:
        """The step is not read, at least not now."""
        self._waiting.append(plan.slot_mapping)
        if len(self._waiting) >= KEPT:
            self.settle()

    def skip(self, plan: StepPlan) -> None:
        """The step is never read."""
        self._skipped.append((plan.rows, plan.slot_mapping))
        if len(self._skipped) >= KEPT:
            self.settle()

    def settle(self) -> None:
        """Bring up to date what is known."""
        if self._waiting:
            self._known[np.concatenate(self._waiting) // self._size] = False
            self._waiting = []
        if self._skipped:
            rows, slots = zip(*self._skipped, strict=True)
            self.whole[np.concatenate(rows)] = False
            self._known[np.concatenate(slots) // self._size] = False
            self._skipped = []

    def prepare(self, plan: StepPlan) -> None:
        """Blocks are copied, and rows become others', before the forward of `plan`."""
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
        """bool [n]: which of `rows` [n] wait for blocks of others, but for those with `slots`, about to be
        read."""
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

    def wrote(self, read: HeadBatch) -> None:
        """The head has keys of these tokens, of whole rows, now."""
        self.settle()
        blocks = read.slots // self._size
        if read.is_all is not None:  # the block in which a row has more to be read is not known yet
            ends = read.starts + read.counts
            index = counting(read.counts) + np.repeat(read.starts, read.counts)
            is_done = np.repeat(read.is_all, read.counts)
            blocks = blocks[is_done | (index // self._size < np.repeat(ends // self._size, read.counts))]
        self._known[blocks] = True

    def lose(self, rows: np.ndarray) -> None:
        self.settle()
        self.whole[rows] = False
