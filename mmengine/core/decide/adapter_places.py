"""Decides whether a waiting request's LoRA adapter may run beside the adapters that already run.

At most `max_loras` adapters run at the same time. Each of them occupies a place. A waiting request is passed
over if its adapter gets no place or does not fit into `lora_bytes`, and later requests may start before it.

The next free place is reserved for the first request that was passed over, so that the request does not wait
forever. No later request may take the reserved place for another adapter. To free a place, the scheduler lets
the leaving adapter's requests end. The leaving adapter is the running adapter whose most recent admission is
longest ago. New requests with the leaving adapter are admitted only if they arrived at most `max_num_seqs`
requests after the first passed-over request. Without this allowance, the adapters would take turns after each
request and never share a step.

Under vLLM's rules no place is reserved.
"""

from collections.abc import Callable

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View


class AdapterPlaces:
    """The places for adapters in one step, for an engine with adapters.

    The caller calls `has_place` for the waiting requests in queue order. Requests that earlier decisions of
    the step passed over also have reserved places. `may_start`: as in `Admission.admit_next`.
    """

    def __init__(self, view: View, may_start: Callable[[RequestView], bool] | None = None):
        self._view, self._pool = view, view.adapters
        self._promised: dict[bytes, int] = {}  # digest -> bytes of each adapter that waits for a place
        self.waits_longest: RequestView | None = None  # the next place is reserved for this request
        self._leaving: bytes | None = None
        for req_state in view.tenants.passed():
            if may_start is None or may_start(req_state):
                self.pass_over(req_state)

    def has_place(self, req_state: RequestView) -> bool:
        """Return whether the request's adapter has a place or gets one now. If not, the request counts as
        passed over.
        """
        adapter = req_state.request.adapter
        if adapter is None:
            return True
        if self._pool.is_held(adapter.digest):
            return not self._comes_late(req_state) or adapter.digest != self.leaving
        free = self._view.config.max_loras - self._pool.num_held - len(self._promised)
        # Thousands of adapters may wait. Their bytes are added up only if a place is free.
        if free > 0 and self._pool.room_for(adapter, sum(self._promised.values())) is not None:
            return True
        self.pass_over(req_state)
        return False

    def pass_over(self, req_state: RequestView) -> None:
        """Reserve a place for the adapter of a request that does not start now. Does nothing if the request
        also waits for its grammar or a block store, or if its adapter already has a place.
        """
        adapter = req_state.request.adapter
        ready = not req_state.waits_for_grammar and req_state.store == SETTLED
        if adapter is None or not ready or self._pool.is_held(adapter.digest):
            return
        self.waits_longest = self.waits_longest or req_state
        self._promised.setdefault(adapter.digest, adapter.num_bytes)

    def _comes_late(self, req_state: RequestView) -> bool:
        first = self.waits_longest
        return first is not None and req_state.arrival - first.arrival > self._view.config.max_num_seqs

    @property
    def leaving(self) -> bytes:
        """The digest of the adapter that has to free its place."""
        if self._leaving is None:
            self._leaving = self._find_leaving()
        return self._leaving

    def _find_leaving(self) -> bytes:
        view, last = self._view, dict[bytes, None]()  # running adapters, most recently admitted first
        for row in reversed(view.running.tolist()):
            if digest := digest_of(view.requests_by_row[row].request.adapter):
                last.setdefault(digest)
        ended = set(view.adapters.of_row.values()) - last.keys()
        return min(ended) if ended else next(reversed(last), b"")
