"""Simulates the KV of layers with a sliding window, to detect wrong block tables.

Each slot contains a number that depends on the row's tokens up to the slot. A wrong number shows that a block
was released too early, was overwritten, or contains another prefix.
"""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan

_FACTOR = np.uint64(0xD6E8FEB86659FD93)


class SimulatedWindows:
    """Writes and checks the slots of block groups with a window. All groups share the pool's slots. `values`
    (uint64) has the number in each slot.
    """

    def __init__(self, config: EngineConfig, values: np.ndarray):
        self._windows = [group.window for group in config.block_groups[1:]]
        self._size, self._values = config.block_size, values

    def run(self, plan: StepPlan) -> np.ndarray:
        """Write the numbers of the step's tokens, and check each query's window.

        Returns uint64 [n]: 0 for each row whose windows have the right numbers. The caller must already have
        written the first group's slots, because the expected numbers are computed from these slots.
        """
        ends = plan.num_computed + plan.num_scheduled
        sums = [self._prefix_sums(plan.block_table[place], end) for place, end in enumerate(ends.tolist())]
        new = [of_row[start:] for of_row, start in zip(sums, plan.num_computed.tolist(), strict=True)]
        wrong = np.zeros(len(ends), np.uint64)
        for number, group in enumerate(plan.windows):
            self._values[group.slot_mapping] = _mixed(np.concatenate(new), number)
        for number, (group, window) in enumerate(zip(plan.windows, self._windows, strict=True)):
            for place, start in enumerate(plan.num_computed.tolist()):
                positions = np.arange(max(0, start - window + 1), ends[place])
                found = self._values[self._slots(group.block_table[place], positions)]
                wrong[place] += np.uint64((found != _mixed(sums[place][positions], number)).sum())
        return wrong * _FACTOR

    def _prefix_sums(self, table: np.ndarray, num_tokens: int) -> np.ndarray:
        return np.cumsum(self._values[self._slots(table, np.arange(num_tokens))], dtype=np.uint64)

    def _slots(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return table[positions // self._size].astype(np.int64) * self._size + positions % self._size


class UniformWindow:
    """Writes and checks the slots of a model whose layers all have a window. `values`, `sums` (uint64): each
    slot's number, and the sum of the row's numbers up to the slot.
    """

    def __init__(self, config: EngineConfig, values: np.ndarray, sums: np.ndarray):
        self._window, self._size = config.uniform_window, config.block_size
        self._values, self._sums = values, sums

    def run(self, plan: StepPlan) -> None:
        """Write the sums for the step's tokens. `values` must already contain the numbers for these tokens.
        If a slot in the window of a row's queries has a wrong number, the row's sums become wrong.
        """
        for place, (start, count) in enumerate(
            zip(plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
        ):
            positions = np.arange(max(0, start - self._window + 1), start + count)
            slots = plan.block_table[place, positions // self._size].astype(np.int64) * self._size
            slots += positions % self._size
            new = slots[len(slots) - count :]
            before = self._sums[slots[-count - 1]] if start else np.uint64(0)
            self._sums[new] = before + np.cumsum(self._values[new], dtype=np.uint64)
            wrong = np.diff(self._sums[slots]) != self._values[slots[1:]]
            self._sums[new] += np.uint64(wrong.sum()) * _FACTOR


def _mixed(sums: np.ndarray, group: int) -> np.ndarray:
    """Return the numbers that a group's slots contain for tokens with these prefix sums."""
    return (sums + np.uint64(group + 1)) * _FACTOR
