"""Finds the reasons why requests were not scheduled in a step, by calling the scheduler's own functions.

A reason depends on the state at the moment of the decision. Call `before` for each event from `schedule`, and
`at_end` after the last event.
"""

import msgspec
import numpy as np

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.deciders import scheduler_of
from mmengine.core.decide.encoder_draft import Shortage
from mmengine.core.decide.running import Wanted
from mmengine.core.decide.start import start_of
from mmengine.core.decide.vllm.scheduler import VllmScheduler
from mmengine.core.decide.whole_runs import least_chunk
from mmengine.core.state.adapters import digest_of
from mmengine.core.state.blocks import further_blocks
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev

BLOCKS, ROWS, TOKENS, STATES = "blocks", "rows", "token budget", "state slots"
ENCODER_BUDGET, ENCODER_CACHE = "encoder budget", "encoder cache"  # Values in `Shortage.what`.
ENCODER_WORK, ENCODER_PIECES = "encoder work", "encoder pieces"  # Values in `Shortage.what`.
GRAMMAR, GROUP, BEHIND, FLIGHT, STORE = "grammar", "group prefill", "behind", "in flight", "store"
GAVE_WAY, PREEMPTING, PREFILL_FIRST, OTHER = "gave way", "preempting step", "prefill first", "other rules"
TRIAL, CHUNK = "trial", "media chunk"
ADAPTERS, ADAPTER_LEAVES = "adapters", "adapter leaves"


class Reason(msgspec.Struct, frozen=True):
    """The reason why a request got no tokens in a step.

    `kind` is one of the constants above. For a shortage, `needed` and `free` are amounts of the missing
    resource, such as blocks or tokens. `other`: the request for which this request waits, or "".
    """

    request_id: str
    kind: str
    needed: int = 0
    free: int = 0
    other: str = ""

    @property
    def short(self) -> int:
        """Return the missing amount."""
        return max(0, self.needed - self.free)

    def sentence(self) -> str:
        """Return the reason as an English clause."""
        return _SENTENCES[self.kind].format(r=self)


_SENTENCES = {
    BLOCKS: "{r.needed} blocks needed, {r.free} free, {r.short} short",
    ROWS: "all rows are taken",
    TOKENS: "the token budget is spent",
    STATES: "running requests hold all {r.needed} state slots",
    ENCODER_CACHE: "an image or video needs {r.needed} embeddings in the encoder cache, {r.free} available, "
    "{r.short} short",
    ENCODER_BUDGET: "an image or video needs {r.needed} embeddings from the encoder budget, {r.free} left, "
    "{r.short} short",
    ENCODER_WORK: "an image or video needs {r.needed} units of encoder work, {r.free} left in the step, "
    "{r.short} short",
    ENCODER_PIECES: "an image or video is encoded in parts ({r.needed} units of encoder work, {r.free} per "
    "step)",
    ADAPTERS: "running requests' adapters take all places (max_loras {r.needed})",
    ADAPTER_LEAVES: "the adapter's place is reserved for {r.other}, which came first",
    GRAMMAR: "the grammar is not compiled yet",
    STORE: "the prefix is requested from a store, or on its way",
    GROUP: "{r.other} computes the shared prompt",
    BEHIND: "{r.other} comes first and does not fit",
    FLIGHT: "a step in flight computes the previous token",
    GAVE_WAY: "preempted in this step",
    PREEMPTING: "no request starts or continues in a step that preempts",
    PREFILL_FIRST: "prompts go first, and this step computes some",
    CHUNK: "the chunk would end inside an image or video, which may not be split",
    TRIAL: "a step failed, and its requests are tried separately from all others",
    OTHER: "this build's rules would have scheduled the request",
}


class Reasons:
    """Collects the reasons why requests are not in a step. `view` shows the current state. The caller calls
    `before` for each event, and then applies the event to the state.
    """

    def __init__(self, view: View):
        self._view = view
        self._scheduler = scheduler_of(view.config)
        self._found: dict[str, Reason] = {}

    def before(self, event: ev.Event) -> None:
        """Record the reasons that follow from the current state. `event`: the event that `schedule` decided
        on this state.
        """
        if self._view.suspects and not isinstance(event, ev.Preempted):
            return
        match event:
            case ev.Scheduled():
                self._check_running(event)
            case ev.Admitted(request_id=name):
                self._check_running(None)
                self._pass_over(name)
            case ev.StatesKept():
                self._check_running(None)
                self._check_waiting()
            # After ENCODED, a step has no further decisions. Therefore all other requests get no tokens.
            case ev.Encoded():
                self._check_running(None)
                self._check_waiting()
            case ev.Preempted(request_id=name):
                self._found[name] = Reason(name, GAVE_WAY)

    def at_end(self) -> list[Reason]:
        """Return a reason for each request that is not in the step. Requests with a row come first. Must be
        called when the step is complete.
        """
        view, step = self._view, set(self._view.step_rows.tolist())
        if not view.suspects:
            self._check_running(None)
            self._check_waiting()
        idle = [view.requests_by_row[row] for row in view.running.tolist() if row not in step]
        return [self._reason_of(req_state) for req_state in (*idle, *view.waiting)]

    def blocks_short(self) -> tuple[int, int]:
        """Return the number of blocks that the running rows need, and the number of free blocks. Both numbers
        explain a preemption.
        """
        rows = self._undecided(None)
        if not len(rows):
            return 0, self._view.blocks.num_free
        wanted = self._scheduler.running.wanted_by(self._view, rows)
        return self._needed(wanted), self._view.blocks.num_free

    def _needed(self, wanted: Wanted) -> int:
        return int(further_blocks(self._view, self._view.config, wanted.rows, wanted.tokens)[1].sum())

    def _reason_of(self, req_state: RequestView) -> Reason:
        view, name = self._view, req_state.request.request_id
        if name in self._found:
            return self._found[name]
        if view.suspects:
            return Reason(name, GRAMMAR if req_state.waits_for_grammar else TRIAL)
        if req_state.row >= 0 and view.preempted_in_step:
            return Reason(name, PREEMPTING)
        if req_state.row >= 0 and view.policy.prefill_first and view.is_open:
            return Reason(name, PREFILL_FIRST)
        return Reason(name, OTHER)

    # Requests with a row

    def _check_running(self, event: ev.Scheduled | None) -> None:
        """Record the reasons for running rows that the scheduler considered but gave no tokens. `event`: the
        scheduler's decision, or None.
        """
        view, scheduler = self._view, self._scheduler
        rows = self._undecided(event)
        wanted = scheduler.running.wanted_by(view, rows) if len(rows) else None
        if event is not None and (wanted is None or not len(wanted.rows)):
            rows = view.running
            running = scheduler.impatient if isinstance(scheduler, VllmScheduler) else scheduler.running
            wanted = running.wanted_by(view, rows) if len(rows) else None
        if wanted is None:
            return
        needed = self._needed(wanted)
        served = set(wanted.rows.tolist())
        for row in rows.tolist():
            name = view.requests_by_row[row].request.request_id
            if row not in served:
                refused = wanted.draft.refused.get(name) if wanted.draft is not None else None
                self._found[name] = self._without_tokens(name, row, refused)
            elif event is None:
                self._found[name] = self._without_decision(name, needed)

    def _without_decision(self, name: str, needed: int) -> Reason:
        """Return the reason why a row that needs tokens is not scheduled in the step."""
        view = self._view
        is_vllm = isinstance(self._scheduler, VllmScheduler)
        if is_vllm and needed <= view.blocks.num_free and not view.preempted_in_step:
            return Reason(name, OTHER)  # Another engine decided the step.
        return Reason(name, BLOCKS, needed, view.blocks.num_free)

    def _undecided(self, event: ev.Scheduled | None) -> ReadOnlyArray:
        """Return the rows that the scheduler considered for this event."""
        rows = self._scheduler.undecided_rows(self._view)
        if event is None or not isinstance(self._scheduler, VllmScheduler):
            return rows
        last = _last_row(self._view, event)  # Under vLLM's rules, rows after this row are considered later.
        return rows[: 1 + rows.tolist().index(last)] if last in rows else rows[:0]

    def _without_tokens(self, name: str, row: int, refused: Shortage | None) -> Reason:
        if refused is not None:
            return Reason(name, refused.what, refused.needed, refused.free)
        if self._view.num_pending[row]:
            return Reason(name, FLIGHT)
        if self._view.tokens_left > 0 and not self._view.config.split_media:
            media = self._view.requests_by_row[row].request.media
            if any(item.end > self._view.num_computed[row] for item in media):
                return Reason(name, CHUNK)
        return Reason(name, TOKENS, 1, 0)

    # Waiting requests

    def _pass_over(self, admitted: str) -> None:
        """Record the reasons for the waiting requests that were considered before the admitted request."""
        places = self._places()
        for req_state in self._view.tenants.rest():
            if req_state.request.request_id == admitted:
                return
            self._note(self._try(req_state, places))

    def _check_waiting(self) -> None:
        """Record the reasons for all remaining waiting requests, when no further request is admitted."""
        view, ahead, places = self._view, "", self._places()
        for req_state in view.tenants.rest():
            name = req_state.request.request_id
            if view.preempted_in_step and (len(view.running) or view.config.compat):
                reason = Reason(name, PREEMPTING)
            elif not view.free_rows:
                reason = Reason(name, ROWS, 1, 0)
            elif view.config.num_state_slots and not view.states.num_free:
                reason = Reason(name, STATES, view.config.num_state_slots, 0)
            elif view.tokens_left <= 0:
                reason = Reason(name, TOKENS, 1, view.tokens_left)
            elif ahead:
                reason = Reason(name, BEHIND, other=ahead)
            else:
                reason = self._try(req_state, places)
                ahead = name if reason.kind in (BLOCKS, TOKENS, OTHER) else ""
            self._note(reason)

    def _note(self, reason: Reason) -> None:
        self._found.setdefault(reason.request_id, reason)

    def _places(self) -> AdapterPlaces | None:
        return self._scheduler.admission.places(self._view)

    def _try(self, req_state: RequestView, places: AdapterPlaces | None) -> Reason:
        """Return the reason why the request cannot start in this state, given that a row and tokens are
        free.
        """
        view, name = self._view, req_state.request.request_id
        admission = self._scheduler.admission
        if places is not None and not places.has_place(req_state):
            if view.adapters.is_held(digest_of(req_state.request.adapter)):
                first = places.waits_longest
                return Reason(name, ADAPTER_LEAVES, other=first.request.request_id if first else "")
            return Reason(name, ADAPTERS, view.config.max_loras, 0)
        if req_state.waits_for_grammar:
            return Reason(name, GRAMMAR)
        if req_state.store != SETTLED:
            return Reason(name, STORE)
        start = start_of(view, req_state)
        if start is None:
            return Reason(name, GROUP, other=req_state.request.group)
        length = admission.first_chunk(view, req_state, start)
        if not length:
            needed = max(1 + view.config.num_draft_tokens, least_chunk(view, req_state, start.num_computed))
            return Reason(name, TOKENS, needed, view.tokens_left)
        draft = admission.draft(view)
        length = admission.cut(view, draft, req_state, start, length)
        if not length:
            if places is not None:
                places.pass_over(req_state)
            refused = draft.refused[name]
            return Reason(name, refused.what, refused.needed, refused.free)
        needed = admission.blocks_wanted(view, req_state, start, length)
        if needed > view.blocks.num_free:
            return Reason(name, BLOCKS, needed, view.blocks.num_free)
        return Reason(name, OTHER)


def _last_row(view: View, event: ev.Scheduled) -> int:
    """Return the event's last row, or -1 if the event has no rows."""
    if event.rows is None:
        return int(view.last_rows[-1]) if len(view.last_rows) else -1
    rows = np.frombuffer(event.rows, np.int32)
    return int(rows[-1]) if len(rows) else -1
