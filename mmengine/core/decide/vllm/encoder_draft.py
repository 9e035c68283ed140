"""Drafts encoder work as vLLM does."""

from mmengine.core.decide.encoder_draft import EncoderDraft
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev


class VllmEncoderDraft(EncoderDraft):
    """Encoder work of one decision under vLLM's rules. `is_patient`: a row waits for the item that its
    drafter would read next, if other rows run."""

    def __init__(self, view: View, *, is_patient: bool = True):
        super().__init__(view)
        self._waits = is_patient and len(view.running) > 1

    def cut_before(self, distance: int) -> int:
        """Cut right before the item: vLLM drafts for the last token without the token that comes next."""
        if distance > self._ahead:
            return distance
        return 0 if self._waits else max(0, distance)

    def left_behind(self, given_up: bool) -> ev.Evicted | None:
        """Return EVICTED for evictions that stay. The items that a `given_up` request looked up count as
        used."""
        used = [key for key in self._looked_up if key in self._cache.idle] if given_up else []
        idle = [key for key in self._cache.idle if key not in self.evict]
        if used == idle[len(idle) - len(used) :]:
            used = []
        return ev.Evicted(tuple(self.evict), tuple(used)) if self.evict or used else None
