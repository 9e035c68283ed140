"""The scheduler: decides a step, one event at a time.

Each event is a pure function of the state after the previous event was applied. An asterisk marks an event
that may occur any number of times:

    PREEMPTED*   while the running rows need more blocks than are free
    SCHEDULED    the running rows, in admission order
    ADMITTED*    waiting requests, while there are rows, tokens and blocks
    STATESKEPT   recurrent states of the rows, for later prefix hits (core/decide/kept_states.py)
    ENCODED      a part of an item that is too large for a step (core/decide/encoder_parts.py)

A block that one event fills can therefore be a prefix hit for a later event in the same step. There is no
prefill or decode phase: a step computes known tokens without KV, up to the token budget. The order under
vLLM's rules differs (core/decide/vllm/scheduler.py).

With max_in_flight 2, the scheduler decides a step while the previous step runs, if no decision depends on the
previous step's result (core/state/overlap.py). The token that the previous step samples for a row counts as
known (`num_pending`), although the token's id is unknown.
"""

from mmengine.core.decide.admission import Admission
from mmengine.core.decide.encoder_parts import next_part
from mmengine.core.decide.fault_isolation import next_trial
from mmengine.core.decide.kept_states import keep_states
from mmengine.core.decide.running import RunningRows
from mmengine.core.state import overlap
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

DECISION_VERSION = 1


class Scheduler:
    """Decides by this engine's rules. Instances have no state."""

    # Whether a request that is cancelled during a step ends before the step's result is applied.
    ends_leavers_first = False
    # Whether a request may be preempted while a step in flight computes its tokens.
    preempts_in_flight = False

    def __init__(self, admission: Admission, running: RunningRows):
        self.admission, self.running = admission, running

    def constants(self, lookahead_tokens: int) -> ev.FoldConstants:
        """Return the constants that the fold needs to apply this scheduler's decisions."""
        return ev.FoldConstants()

    def schedule(self, view: View) -> ev.StepDecision | None:
        """Return this step's next decision, or None if the step is complete or no request can run."""
        if view.step_part is not None:
            return None
        if view.flights and not view.is_open and self.waits_for(view):
            return None
        # STATESKEPT refers to states at the end of the step, so no row may join the step after STATESKEPT.
        event = None if view.step_kept else self._next_rows(view)
        if isinstance(event, ev.Preempted) and view.flights and not self.preempts_in_flight:
            return None  # a preempted row's blocks do not become free while a step in flight uses them
        if event is None and view.config.num_state_slots and not view.step_kept:
            event = keep_states(view)
        if event is None and view.num_large:
            return next_part(view, self.admission)
        return event

    def waits_for(self, view: View) -> str:
        """Return why the next step must wait for a step in flight, or "" (see overlap.waits_for)."""
        return overlap.waits_for(view)

    def why_it_waits(self, view: View) -> str:
        """Return why `schedule` decided nothing while another step runs: a reason in overlap.HOW."""
        reason = self.waits_for(view)
        if not reason and isinstance(self._next_rows(view), ev.Preempted):
            reason = overlap.BLOCKS
        return reason or overlap.ALONE

    def undecided_rows(self, view: View) -> ReadOnlyArray:
        """Return the running rows, intp, that this step's next decision may schedule."""
        if view.is_open:
            return view.running[:0]
        return _prefills(view) if view.policy.prefill_first else view.running

    def _next_rows(self, view: View) -> ev.StepDecision | None:
        if view.suspects:
            return next_trial(view, self.admission, self.running)
        return self.next_event(view)

    def next_event(self, view: View) -> ev.StepDecision | None:
        """Return the next decision about running and waiting requests. Not called while the requests from a
        failed step are retried in smaller steps.
        """
        rows = self.undecided_rows(view)
        event = self.running.schedule(view, rows) if len(rows) else None
        if event is not None:
            return event
        admission = self.admission.admit_next(view)
        if admission is None and view.policy.prefill_first and not view.is_open and len(view.running):
            return self.running.schedule(view, view.running)
        return admission


def _prefills(view: View) -> ReadOnlyArray:
    """Return the running rows, intp, whose prompts are not completely computed."""
    running = view.running
    left = view.num_tokens[running] + view.num_pending[running] - view.num_computed[running]
    return running[left > 1]


SCHEDULER = Scheduler(Admission(), RunningRows())
