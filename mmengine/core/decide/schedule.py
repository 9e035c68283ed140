"""The scheduler: what the next event of the open step is.

There is no prefill phase and no decode phase: each request's computed tokens catch up with its
known tokens. A step is decided one event at a time, each a pure function of the state that the
event before left behind:

    PREEMPTED*   while the running rows need more blocks than are free
    SCHEDULED    the running rows, in admission order
    ADMITTED*    waiting requests, while there are rows, tokens and blocks
    STATESKEPT   recurrent states of its rows, for later prefix hits (core/decide/states_kept.py)
    ENCODED      a part of an item that is too large for a step (core/decide/encoder_parts.py)

so that a block scheduled by one event can be a prefix hit of the next. Where decisions are vLLM's, rows
are decided one after the other: SCHEDULED for those before the one whose blocks are not free, PREEMPTED
for that one, SCHEDULED for the rest; EVICTED says what a chunk left behind that did not run after all.

With max_in_flight 2 a step is decided while the one before runs, where that leaves nothing open that it
depends on (core/state/overlap.py). The token that a running row will get from that one counts as known
(`num_pending`), though nobody knows yet which it is.
"""

from mmengine.config import EngineConfig
from mmengine.core.decide.admission import admit_next
from mmengine.core.decide.encoder_parts import next_part
from mmengine.core.decide.fault_isolation import try_suspects
from mmengine.core.decide.running import schedule_running
from mmengine.core.decide.states_kept import keep_states
from mmengine.core.state import overlap
from mmengine.core.state.blocks import COMPAT_VERSION
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

DECISION_VERSION = 4
# Of logs that this build decides on, each by its own rules: ours, and those with vLLM's decisions.
DECIDED_VERSIONS = (2, 3, 4)
COMPAT_DECIDED_VERSIONS = (4, COMPAT_VERSION)


def decision_version(config: EngineConfig) -> int:
    """By which rules this build decides with these settings: vLLM's have a number of their own."""
    return COMPAT_VERSION if config.compat else DECISION_VERSION


def decides(config: EngineConfig, version: int) -> bool:
    """Whether this build decides as the one did that wrote a log with these settings under `version`."""
    return version in (COMPAT_DECIDED_VERSIONS if config.compat else DECIDED_VERSIONS)


def schedule(view: View) -> ev.StepDecision | None:
    """The next decision of this step; None when the step is complete, or nothing can run."""
    if view.step_part is not None:
        return None
    if view.flights and not view.is_open and overlap.waits_for(view):
        return None
    # What is kept in this step is there behind it: nobody else is admitted then.
    event = None if view.step_kept else _wanted(view)
    if isinstance(event, ev.Preempted) and view.flights:
        return None  # blocks that a step in flight names would not become free now
    if event is None and view.config.compat and not view.is_open and len(view.running):
        # Each row waits for what its drafter would read next, and another holds: vLLM stands still.
        return schedule_running(view, view.running, patient=False)
    if event is None and view.config.num_state_slots and not view.step_kept:
        event = keep_states(view)
    if event is None and view.num_large:
        return next_part(view)
    return event


def why_it_waits(view: View) -> str:
    """Why `schedule` opened no step while one runs: one of overlap.HOW."""
    reason = overlap.waits_for(view)
    if not reason and isinstance(_wanted(view), ev.Preempted):
        reason = overlap.BLOCKS
    return reason or overlap.ALONE


def _wanted(view: View) -> ev.StepDecision | None:
    return try_suspects(view) if view.suspects else _next_event(view)


def _next_event(view: View) -> ev.StepDecision | None:
    if view.policy.prefill_first:
        return _prefill_first(view)
    event = None
    if view.config.compat or not view.is_open:
        rows = view.running[view.num_decided :] if view.config.compat else view.running
        event = schedule_running(view, rows) if len(rows) else None
    if event is not None:
        return event
    if view.config.compat and view.preempted_in_step:
        return None if view.is_open else ev.Scheduled(b"", b"")  # a step in which nobody runs
    return admit_next(view)


def _prefill_first(view: View) -> ev.StepDecision | None:
    """Prompts that are half computed, then new ones; who decodes runs in steps without either."""
    if not view.is_open:
        running = view.running
        left = view.num_tokens[running] + view.num_pending[running] - view.num_computed[running]
        behind = running[left > 1]
        event = schedule_running(view, behind) if len(behind) else None
        if event is not None:
            return event
    admission = admit_next(view)
    if admission is None and not view.is_open and len(view.running):
        return schedule_running(view, view.running)
    return admission
