"""The exact scheduling rules of single vLLM versions, for logs that were recorded with these versions. Where
vLLM hangs, these rules hang too, unlike the rules in scheduler.py.

    0.32   the scan of the waiting queue stops at a request that does not fit the encoder
           the scan of the running requests stops when a request preempts itself
           with EAGLE, a prefix hit leaves out the last block, and encoder outputs are held longer
           only scheduled requests' adapters count as running
    0.33   with disable_chunked_mm_input, a chunk that starts at an item must not split the item
"""

from msgspec.structs import replace

from mmengine.core.decide.adapter_places import AdapterPlaces
from mmengine.core.decide.admission import MayStart
from mmengine.core.decide.vllm.scheduler import (
    UnreservedPlaces,
    VllmAdmission,
    VllmEncoderDraft,
    VllmRunningRows,
    VllmScheduler,
)
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.request_state import NO_ROW
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem


class VllmEncoderDraft033(VllmEncoderDraft):
    """One decision's encoder work by vLLM 0.33's rules."""

    def would_split(self, item: MediaItem, start: int, end: int) -> bool:
        return start <= item.start and end - self._ahead < item.end

    def cut_before(self, distance: int) -> int:
        return max(0, distance)


class VllmScheduler033(VllmScheduler):
    """Decides by vLLM 0.33's rules."""

    def __init__(self) -> None:
        super().__init__(VllmAdmission(VllmEncoderDraft033), VllmRunningRows(VllmEncoderDraft033))
        self.impatient = self.running


class VllmEncoderDraft032(VllmEncoderDraft):
    """One decision's encoder work by vLLM 0.32's rules. A drafter reads one token ahead. With a drafter, a
    chunk that must stop before an item therefore stops one token earlier.
    """

    def would_split(self, item: MediaItem, start: int, end: int) -> bool:
        return start < item.start and end - self._ahead < item.end

    def cut_before(self, distance: int) -> int:
        return max(0, distance - self._ahead)


class ScheduledPlaces(UnreservedPlaces):
    """Adapter slots by vLLM 0.32's rules: only adapters in the current step occupy slots."""

    def has_place(self, req_state: RequestView) -> bool:
        adapter, view = req_state.request.adapter, self._view
        if adapter is None:
            return True
        adapters = [view.requests_by_row[row].request.adapter for row in view.step_rows.tolist()]
        used = {each.digest for each in adapters if each is not None}
        return adapter.digest in used or len(used) < view.config.max_loras


class VllmAdmission032(VllmAdmission):
    """Admits requests by vLLM 0.32's rules: admission stops at the first request that does not fit the
    encoder.
    """

    stops_at_encoder = True

    def places(self, view: View, may_start: MayStart | None = None) -> AdapterPlaces | None:
        return ScheduledPlaces(view, may_start) if view.config.max_loras else None


class VllmScheduler032(VllmScheduler):
    """Decides by vLLM 0.32's rules."""

    def __init__(self) -> None:
        super().__init__(VllmAdmission032(VllmEncoderDraft032), VllmRunningRows(VllmEncoderDraft032))
        self.impatient = self.running

    def constants(self, lookahead_tokens: int) -> ev.FoldConstants:
        held = int(lookahead_tokens > 0)
        return replace(super().constants(lookahead_tokens), media_ahead=0, media_held_ahead=held)

    def next_event(self, view: View) -> ev.StepDecision | None:
        if self._gave_up(view):
            return None if view.is_open else ev.Scheduled(b"", b"")
        return super().next_event(view)

    @staticmethod
    def _gave_up(view: View) -> bool:
        """Return whether a request preempted itself for lack of blocks. vLLM 0.32 then schedules no other
        row.
        """
        row = view.made_room_for[0]
        return row != NO_ROW and row not in view.running


VLLM_032_SCHEDULER = VllmScheduler032()
VLLM_033_SCHEDULER = VllmScheduler033()
