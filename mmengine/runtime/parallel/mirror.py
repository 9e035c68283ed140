"""Rebuilds an engine's state in another process from the engine's log.

Each rank in a sharded model applies the same records as rank 0 and derives each step's plan, so rank 0 sends
no plans.
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
    """A copy of an engine's state that follows the engine's log.

    `state`: the initial state, which the mirror changes in place.
    """

    def __init__(self, state: State) -> None:
        self.state, self._view = state, View(state)
        self._tables = BlockTables(keeps=state.config.max_in_flight <= 1)

    def fold(self, frames: bytes) -> StepPlan | None:
        """Apply complete frames from the log. Return the plan for the step that the frames contain, or None.

        The frames must contain at most one step. Raises CorruptLog for bytes that are not frames, and
        Diverged if this state differs from a digest in the log.
        """
        decisions: list[ev.Event] = []
        plan: StepPlan | None = None
        for record in _records(frames):
            event = record.event
            # DISPATCHED closes the step, so the plan must be built before DISPATCHED is applied.
            if isinstance(event, ev.Dispatched):
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
                f"at record {record.sequence} (step {record.step}) this rank's state differs "
                "from the digest in the log"
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
