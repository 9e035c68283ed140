"""Rebuild an engine's state in another process from its log alone.

A rank with a sharded model folds the same records as rank 0, and derives each step's plan from its own fold.
So there is no second encoding of a step.
"""

from mmengine.core.batch import BlockTables, batch
from mmengine.core.executor import StepPlan
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.core.state.view import View
from mmengine.errors import Diverged
from mmengine.events import vocabulary as ev
from mmengine.events.codec import Record, frame_at, records_in


class Mirror:
    """An engine's state, folded from its log. `state`: the initial state, owned by the mirror from then
    on.
    """

    def __init__(self, state: State) -> None:
        self.state, self._view = state, View(state)
        self._tables = BlockTables(keeps=state.config.max_in_flight <= 1)

    def fold(self, frames: bytes) -> StepPlan | None:
        """Apply whole frames, which end with at most one decided step; return the step's plan, or None.

        Raises CorruptLog for bytes that are no frames, and Diverged if a digest shows that the fold differs
        from rank 0's state.
        """
        decisions: list[ev.Event] = []
        plan: StepPlan | None = None
        for record in _records(frames):
            event = record.event
            if isinstance(event, ev.Dispatched):  # closes the step, so its plan is built first
                plan = batch(self._view, decisions, self._tables)
            self._apply(record)
            if isinstance(event, (ev.Scheduled, ev.Admitted, ev.Encoded)):
                decisions.append(event)
        if plan is None and decisions:
            plan = batch(self._view, decisions, self._tables)
        return plan

    def _apply(self, record: Record) -> None:
        event = record.event
        if isinstance(event, ev.Checkpoint) and event.digest != state_digest(self.state):
            raise Diverged(
                f"at record {record.sequence} (step {record.step}) the fold differs from the recorded state"
            )
        evolve(self.state, event)


def _records(frames: bytes) -> list[Record]:
    records: list[Record] = []
    offset = 0
    while offset < len(frames):
        frame = frame_at(frames, offset)
        records += records_in(frames, frame)
        offset = frame.end
    return records
