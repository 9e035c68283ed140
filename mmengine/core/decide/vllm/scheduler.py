"""A scheduler with vLLM's rules: schedules running rows one after the other, then admits waiting requests.

If blocks run out, a step has several events. SCHEDULED covers the rows before the first row that lacks
blocks. PREEMPTED frees blocks for this row. Another SCHEDULED covers the remaining rows. In any step, EVICTED
records encoder outputs that were evicted for a chunk that then could not be scheduled. The rules follow vLLM
0.33, except where vLLM is known to hang. versions.py reproduces single versions exactly.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
from msgspec.structs import replace

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.admission import Admission, AdmissionDecision, MayStart, num_free_hits
from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.decide.running import RunningRows, Wanted, preempt, with_drafts
from mmengine.core.decide.scheduler import Scheduler
from mmengine.core.decide.start import Start
from mmengine.core.decide.vllm.block_groups import (
    active_rows,
    blocks_of_row,
    num_new_blocks,
    with_blocks_by_number,
)
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class VllmEncoderDraft(EncoderDraft):
    """A scheduling decision's encoder work, by vLLM's rules. `is_patient`: whether a row computes nothing
    while the image or video that its drafter reads next cannot be encoded. A row that runs alone does not
    wait.
    """

    def __init__(self, view: View, *, is_patient: bool = True):
        super().__init__(view)
        self._waits = is_patient and len(view.running) > 1

    def cut_before(self, distance: int) -> int:
        """Return the length of a chunk that ends directly before an image or video. Returns 0 if the row must
        wait. `distance`: as in EncoderDraft.
        """
        if distance > self._ahead:
            return distance
        return 0 if self._waits else max(0, distance)

    def left_behind(self, given_up: bool) -> ev.Evicted | None:
        """Return EVICTED if the encoder cache changes and the chunk does not run, else None.
        `given_up`: whether the request was examined and cannot run in this step. If so, the request's cached
        items become the most recently used.
        """
        used = [key for key in self._looked_up if key in self._cache.idle] if given_up else []
        idle = [key for key in self._cache.idle if key not in self.evict]
        if used == idle[len(idle) - len(used) :]:
            used = []
        return ev.Evicted(tuple(self.evict), tuple(used)) if self.evict or used else None


MakeDraft: TypeAlias = Callable[[View], VllmEncoderDraft]  # Returns an empty VllmEncoderDraft.


class UnreservedPlaces(AdapterPlaces):
    """The LoRA adapters that may run in a step, by vLLM's rules. A skipped request reserves no place for its
    adapter.
    """

    def pass_over(self, req_state: RequestView) -> None:
        """Do nothing, because vLLM reserves no place for a skipped request."""


class VllmAdmission(Admission):
    """Admits waiting requests by vLLM's rules."""

    def __init__(self, make_draft: MakeDraft = VllmEncoderDraft):
        self._make_draft = make_draft

    def draft(self, view: View) -> EncoderDraft:
        return self._make_draft(view)

    def admit_next(self, view: View, may_start: MayStart | None = None) -> AdmissionDecision | None:
        """Return the next admission event. Skips a preempted request until it has got its tokens from
        steps in flight, unless these tokens are dropped.
        """
        if len(view.running) >= view.config.max_num_seqs:
            return None
        awaited = {id(req_state) for req_state, drops in view.stale.values() if not drops}
        if not awaited:
            return super().admit_next(view, may_start)
        return super().admit_next(
            view, lambda each: id(each) not in awaited and (may_start is None or may_start(each))
        )

    def places(self, view: View, may_start: MayStart | None = None) -> AdapterPlaces | None:
        return UnreservedPlaces(view, may_start) if view.config.max_loras else None

    def padding(self, view: View, num_computed: int) -> int:
        """Return the request's number of draft placeholders.

        vLLM adds placeholders if all running rows in the step decode. All rows then compute equal numbers of
        tokens. A single-token prompt gets no placeholders if it runs alone.
        """
        num_drafts = view.config.num_draft_tokens
        if not num_drafts or num_computed + num_drafts + 2 > view.config.max_model_len:
            return 0
        ran = [view.requests_by_row[row] for row in view.step_rows.tolist()]
        ran = [req_state for req_state in ran if req_state.admitted_step < view.step]
        decodes = all(
            len(req_state.tokens) <= view.num_computed[req_state.row] - view.scheduled[req_state.row]
            for req_state in ran
        )
        return num_drafts if (ran or num_computed) and decodes else 0

    def blocks_wanted(self, view: View, req_state: RequestView, start: Start, length: int) -> int:
        if not view.has_lazy_windows:
            return super().blocks_wanted(view, req_state, start, length)
        return num_new_blocks(view, req_state, start, length) + num_free_hits(view, start.cached)

    def _admission(
        self, view: View, req_state: RequestView, start: Start, length: int, draft: EncoderDraft
    ) -> ev.Admitted | ev.LeaseTaken | None:
        decision = super()._admission(view, req_state, start, length, draft)
        if view.has_lazy_windows and isinstance(decision, ev.Admitted):
            return with_blocks_by_number(view, decision)
        return decision

    def prompt_reserve(self, view: View, req_state: RequestView) -> int:
        """Return how many blocks the prompt needs, without the drafter's lookahead."""
        return -(-len(req_state.tokens) // view.block_size)


class VllmRunningRows(RunningRows):
    """Schedules running rows by vLLM's rules, one row after the other."""

    def __init__(self, make_draft: MakeDraft = VllmEncoderDraft):
        self._make_draft = make_draft

    def draft(self, view: View) -> EncoderDraft:
        return self._make_draft(view)

    def tokens_left(self, view: View, rows: ReadOnlyArray) -> np.ndarray:
        wanted = view.num_tokens[rows] - view.num_computed[rows]
        if view.flights:
            wanted = wanted + view.num_pending[rows]
        if view.config.num_draft_tokens:
            wanted = with_drafts(view, rows, wanted)
        # A preemption for the first row must not change the length of the row's chunk.
        if view.made_room_for[0] == rows[0]:
            wanted[0] = min(wanted[0], view.made_room_for[1])
        if view.flights:
            pending = view.num_pending[rows]
            reached = view.num_computed[rows] + 2 - pending >= view.max_total[rows]
            wanted = np.minimum(wanted, view.config.max_model_len - 1 - view.num_computed[rows])
            wanted[(pending > 0) & reached] = 0
        return wanted

    def scheduled(self, view: View, wanted: Wanted, num_new: int) -> ev.Scheduled:
        last = int(np.argmax(np.asarray(view.running == wanted.rows[-1])))
        return replace(super().scheduled(view, wanted, num_new), num_decided=last + 1)

    def relieve(
        self, view: View, wanted: Wanted, short: np.ndarray, further: np.ndarray
    ) -> ev.Preempted | ev.Scheduled | ev.Evicted:
        """Schedule the rows before the first row that lacks blocks. If no rows precede this row, preempt a
        request to free blocks for the row.
        """
        lacking = int(np.argmax(np.cumsum(further) > view.blocks.num_free))
        if short[lacking]:
            before = self._wanted_before(view, int(wanted.rows[short[lacking]]))
            return self.scheduled(view, before, int(further[:lacking].sum()))
        return self._make_room(view, wanted)

    def schedule(
        self, view: View, rows: ReadOnlyArray
    ) -> ev.Preempted | ev.Scheduled | ev.Evicted | ev.LeaseTaken | None:
        wanted = self.wanted_by(view, rows) if view.has_lazy_windows else None
        if wanted is None or not len(wanted.rows):
            return super().schedule(view, rows)
        active, further = active_rows(view, wanted)
        if not len(active):
            return self.scheduled(view, wanted, 0)
        row, count = int(wanted.rows[active[0]]), int(further[active[0]])
        blocks = blocks_of_row(view, row, count)
        if blocks is None and not active[0]:
            return self._make_room(view, wanted)
        if blocks is None:
            return self.scheduled(view, self._wanted_before(view, row), 0)
        if len(active) > 1:
            wanted = self._wanted_before(view, int(wanted.rows[active[1]]))
        return replace(self.scheduled(view, wanted, 0), new_blocks=blocks.tobytes())

    def _wanted_before(self, view: View, row: int) -> Wanted:
        """Return the wanted tokens for the unscheduled rows before `row`."""
        undecided = view.running[view.num_decided :]
        return self.wanted_by(view, undecided[: undecided.tolist().index(row)])

    def _make_room(self, view: View, wanted: Wanted) -> ev.Preempted | ev.Evicted:
        """Return the next event that frees blocks for the first wanted row."""
        row, undecided = int(wanted.rows[0]), view.running[view.num_decided :]
        place = undecided.tolist().index(row)
        draft, victim = self.wanted_by(view, undecided[: place + 1]).draft, view.policy.victim(view)
        left_behind = draft.left_behind(given_up=victim == row) if draft else None
        return left_behind or preempt(view, row, int(wanted.tokens[0]))


class VllmScheduler(Scheduler):
    """Decides by vLLM 0.33's rules, without its known hangs."""

    ends_leavers_first = True
    preempts_in_flight = True

    def __init__(
        self, admission: VllmAdmission | None = None, running: VllmRunningRows | None = None
    ) -> None:
        super().__init__(admission or VllmAdmission(), running or VllmRunningRows())
        self.impatient: RunningRows = VllmRunningRows(partial(VllmEncoderDraft, is_patient=False))

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
            # Every row waits for its drafter's next item. Decide again without waiting, so that a row can
            # run.
            return self.impatient.schedule(view, view.running)
        return event

    def waits_for(self, view: View) -> str:
        return ""

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
