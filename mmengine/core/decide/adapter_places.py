"""Whether the adapter of a waiting request may join those that run, of which there are `max_loras` at most.

Whoever finds no place, or no room in `lora_bytes`, is passed over, and those behind it may start. So that it
does not wait for ever, the next place is its own: nobody behind it takes one with another adapter, and of the
adapters that run one gives its place up, the one whose last request began longest ago. That one takes nobody
on who came long after the one that waits, `max_num_seqs` requests later, and so ends when its rows do: so
many may overtake, because adapters that took turns one request at a time would share no step. Where decisions
are vLLM's nothing is kept for anybody.
"""

from collections.abc import Callable

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.reading import RequestView
from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View


class AdapterPlaces:
    """Asked of waiting requests in their order; those that were passed over in this step before count. Only
    where there may be adapters. `may_start`: as for `admit_next`."""

    def __init__(self, view: View, may_start: Callable[[RequestView], bool] | None = None):
        self._view, self._pool = view, view.adapters
        self._compat = bool(view.config.compat)
        self._promised: dict[bytes, int] = {}  # adapters that wait for a place, and their bytes
        self.waits_longest: RequestView | None = None  # for whom the next place is kept
        self._leaving: bytes | None = None
        for req_state in view.waiting[: view.scan_from]:
            if may_start is None or may_start(req_state):
                self.pass_over(req_state)

    def has_one(self, req_state: RequestView) -> bool:
        """Whether it may start, as far as its adapter goes. Who may not is passed over."""
        adapter = req_state.request.adapter
        if adapter is None:
            return True
        if self._pool.is_held(adapter.digest):
            return not self._comes_late(req_state) or adapter.digest != self.leaving
        free = self._view.config.max_loras - self._pool.num_held - len(self._promised)
        # Thousands may wait: their bytes matter where there are fewer than places.
        if free > 0 and self._pool.room_for(adapter, sum(self._promised.values())) is not None:
            return True
        self.pass_over(req_state)
        return False

    def pass_over(self, req_state: RequestView) -> None:
        """It does not start now, though nothing else keeps it: a place is kept for it."""
        adapter = req_state.request.adapter
        ready = not req_state.waits_for_grammar and req_state.store == SETTLED
        if adapter is None or not ready or self._compat or self._pool.is_held(adapter.digest):
            return
        self.waits_longest = self.waits_longest or req_state
        self._promised.setdefault(adapter.digest, adapter.num_bytes)

    def _comes_late(self, req_state: RequestView) -> bool:
        first = self.waits_longest
        return first is not None and req_state.arrival - first.arrival > self._view.config.max_num_seqs

    @property
    def leaving(self) -> bytes:
        """The adapter that gives its place up."""
        if self._leaving is None:
            self._leaving = self._find_leaving()
        return self._leaving

    def _find_leaving(self) -> bytes:
        view, last = self._view, dict[bytes, None]()  # by when its last request began, the latest first
        for row in reversed(view.running.tolist()):
            if digest := digest_of(view.requests_by_row[row].request.adapter):
                last.setdefault(digest)
        ended = set(view.adapters.of_row.values()) - last.keys()
        return min(ended) if ended else next(reversed(last), b"")
