"""vLLM's scheduler: decides running rows one after the other, then admits waiting requests.

A step has SCHEDULED for the rows before the first row whose blocks are not free, PREEMPTED for that row, and
SCHEDULED for the rest. EVICTED records a chunk's encoder evictions that does not run after all. The
rules are those of vLLM 0.33.
"""

from mmengine.core.decide.scheduler import Scheduler
from mmengine.core.decide.vllm.admission import VllmAdmission
from mmengine.core.decide.vllm.running import VllmRunningRows
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class VllmScheduler(Scheduler):
    """Decides by vLLM's rules."""

    ends_leavers_first = True

    def __init__(self) -> None:
        super().__init__(VllmAdmission(), VllmRunningRows())
        self.impatient = VllmRunningRows(is_patient=False)

    def constants(self, lookahead_tokens: int) -> ev.FoldConstants:
        return ev.FoldConstants(
            isolates_failures=False,
            keeps_broken_blocks=True,
            frees_at_once=True,
            fills_in_row_order=True,
            media_ahead=int(lookahead_tokens > 0),
        )

    def schedule(self, view: View) -> ev.StepDecision | None:
        event = super().schedule(view)
        if event is None and not view.is_open and len(view.running):
            # Each row waits for the item that its drafter would read next, and another row holds that item.
            return self.impatient.schedule(view, view.running)
        return event

    def undecided_rows(self, view: View) -> ReadOnlyArray:
        return view.running[view.num_decided :]

    def next_event(self, view: View) -> ev.StepDecision | None:
        rows = self.undecided_rows(view)
        event = self.running.schedule(view, rows) if len(rows) else None
        if event is not None:
            return event
        if view.preempted_in_step:
            return None if view.is_open else ev.Scheduled(b"", b"")  # a step without rows
        return self.admission.admit_next(view)


VLLM_SCHEDULER = VllmScheduler()
