"""Decides whether a waiting request's LoRA adapter may run beside the adapters that already run.

At most `max_loras` adapters run at the same time. Each running adapter occupies a place. A waiting request is
passed over if no place, or too little of `lora_bytes`, is left for its adapter. Later requests may then start
first.

The next free place is reserved for the first passed-over request, so that the request does not wait forever.
The running adapter with the least recent admission is the leaving adapter. The leaving adapter's running
requests finish. Later requests with this adapter must wait, except the first `max_num_seqs` arrivals after
the first passed-over request. Without this exception, adapters would replace each other after every request.

Under vLLM's rules, no place is reserved.
"""

from collections.abc import Callable

from mmengine.core.state.adapters import digest_of
from mmengine.core.state.read_only import RequestView
from mmengine.core.state.request_state import SETTLED
from mmengine.core.state.view import View


class AdapterPlaces:
    """The places for adapters in one step.

    The caller calls `has_place` for the waiting requests in queue order. The constructor reserves places for
    requests that the step has already passed over. `may_start` says which of these requests get a place;
    None: all.
    """

    def __init__(self, view: View, may_start: Callable[[RequestView], bool] | None = None):
        self._view, self._pool = view, view.adapters
        self._promised: dict[bytes, int] = {}  # digest -> size in bytes, for adapters that wait for a place
        self.waits_longest: RequestView | None = None  # the next place is reserved for this request
        self._leaving: bytes | None = None
        for req_state in view.tenants.passed():
            if may_start is None or may_start(req_state):
                self.pass_over(req_state)

    def has_place(self, req_state: RequestView) -> bool:
        """Return whether the request's adapter has a place or gets a place now. Otherwise the request is
        passed over.
        """
        adapter = req_state.request.adapter
        if adapter is None:
            return True
        if self._pool.is_held(adapter.digest):
            return not self._comes_late(req_state) or adapter.digest != self.leaving
        free = self._view.config.max_loras - self._pool.num_held - len(self._promised)
        # Check `free` first, because the sum is slow if thousands of adapters wait.
        if free > 0 and self._pool.room_for(adapter, sum(self._promised.values())) is not None:
            return True
        self.pass_over(req_state)
        return False

    def pass_over(self, req_state: RequestView) -> None:
        """Reserve a place for the request's adapter. Does nothing if the request also waits for its grammar
        or a block store, or if the adapter already has a place.
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
        """The leaving adapter's digest."""
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
