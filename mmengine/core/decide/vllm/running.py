"""Schedules running rows as vLLM does."""

import numpy as np
from msgspec.structs import replace

from mmengine.core.decide.running import RunningRows, Wanted, preempt, with_drafts
from mmengine.core.decide.vllm.encoder_draft import VllmEncoderDraft
from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class VllmRunningRows(RunningRows):
    """Schedules running rows by vLLM's rules, one row after the other. `is_patient`: see VllmEncoderDraft."""

    def __init__(self, *, is_patient: bool = True):
        self._is_patient = is_patient

    def draft(self, view: View) -> VllmEncoderDraft:
        return VllmEncoderDraft(view, is_patient=self._is_patient)

    def tokens_left(self, view: View, rows: ReadOnlyArray) -> np.ndarray:
        wanted = view.num_tokens[rows] - view.num_computed[rows]
        if view.config.num_draft_tokens:
            wanted = with_drafts(view, rows, wanted)
        if view.made_room_for[0] == rows[0]:  # its chunk stays as it was cut before another row was preempted
            wanted[0] = min(wanted[0], view.made_room_for[1])
        return wanted

    def scheduled(self, view: View, wanted: Wanted, num_new: int) -> ev.Scheduled:
        last = int(np.argmax(np.asarray(view.running == wanted.rows[-1])))
        return replace(super().scheduled(view, wanted, num_new), num_decided=last + 1)

    def relieve(
        self, view: View, wanted: Wanted, short: np.ndarray, further: np.ndarray
    ) -> ev.Preempted | ev.Scheduled | ev.Evicted:
        """Schedule the rows before the first row whose blocks are not free, or preempt for that row.

        The rows before it keep their tokens. The chunk of that row stays as it was cut while all rows were
        there.
        """
        lacking = int(np.argmax(np.cumsum(further) > view.blocks.num_free))
        row = int(wanted.rows[short[lacking]])
        undecided = view.running[view.num_decided :]
        place = undecided.tolist().index(row)
        if short[lacking]:
            return self.scheduled(view, self.wanted_by(view, undecided[:place]), int(further[:lacking].sum()))
        draft, victim = self.wanted_by(view, undecided[: place + 1]).draft, view.policy.victim(view)
        left_behind = draft.left_behind(given_up=victim == row) if draft else None
        return left_behind or preempt(view, row, int(wanted.tokens[0]))
