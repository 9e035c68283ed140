"""The simulated executor's recurrent states. A state is the sum of a row's token values.

Raises ExecutorFailed if a wrong plan gives a row another row's state, or a state that covers the wrong
tokens.
"""

import numpy as np

from mmengine.config import EngineConfig
from mmengine.core.executor import StatePlan, StepPlan
from mmengine.errors import ExecutorFailed
from mmengine.events.vocabulary import NO_STATE


class SimulatedStates:
    def __init__(self, config: EngineConfig):
        self._sums = np.zeros(config.num_state_slots, np.uint64)
        self._lengths = np.zeros(config.num_state_slots, np.int64)  # number of tokens in each state
        # [row, draft]: the values of the previous step's drafts. A draft enters the row's state once
        # accepted.
        self._pending = np.zeros((config.max_num_seqs, config.num_draft_tokens), np.uint64)
        self._num_pending = np.zeros(config.max_num_seqs, np.int64)

    def run(self, plan: StepPlan, states: StatePlan, values: np.ndarray, before: np.ndarray) -> None:
        """Update the states for a step.

        `values` [t]: the values of the step's tokens. `before` [n]: the sum of each row's earlier tokens,
        computed from the KV. Raises ExecutorFailed if a row's state is wrong.
        """
        for source, target in states.begins.tolist():
            if source != target:
                self._sums[target] = 0 if source == NO_STATE else self._sums[source]
                self._lengths[target] = 0 if source == NO_STATE else self._lengths[source]
        fresh = {int(slot) for slot in states.begins[:, 1]}
        start = 0
        kept = states.kept[np.argsort(states.kept[:, 0], kind="stable")]
        for place, (row, slot, count) in enumerate(
            zip(plan.rows.tolist(), states.slots.tolist(), plan.num_scheduled.tolist(), strict=True)
        ):
            if slot in fresh:
                self._num_pending[row] = 0
            own = kept[kept[:, 0] == place, 1:].tolist()
            drafts = 0 if plan.num_drafts is None else int(plan.num_drafts[place])
            self._go_on(row, slot, int(plan.num_computed[place]), int(before[place]), own)
            self._add(row, slot, values[start : start + count - drafts], own)
            self._pending[row, :drafts] = values[start + count - drafts : start + count]
            self._num_pending[row] = drafts
            start += count

    def _go_on(self, row: int, slot: int, num_computed: int, before: int, kept: list[list[int]]) -> None:
        """Add the previous step's accepted drafts to the row's state, and check the state."""
        stayed = num_computed - int(self._lengths[slot])
        if not 0 <= stayed <= self._num_pending[row]:
            raise ExecutorFailed(
                f"the state in slot {slot} covers {self._lengths[slot]} tokens, but row {row}'s state "
                f"should cover {num_computed}"
            )
        self._add(row, slot, self._pending[row, :stayed].copy(), kept)
        if int(self._sums[slot]) != before:
            raise ExecutorFailed(f"the state in slot {slot} is not that of row {row}")

    def _add(self, row: int, slot: int, values: np.ndarray, kept: list[list[int]]) -> None:
        first = int(self._lengths[slot])
        sums = self._sums[slot] + np.cumsum(values, dtype=np.uint64)
        for tokens, target in kept:
            if first < tokens <= first + len(values):
                self._sums[target], self._lengths[target] = sums[tokens - first - 1], tokens
        if len(values):
            self._sums[slot] = sums[-1]
            self._lengths[slot] += len(values)
