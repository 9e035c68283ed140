"""Fetches blocks from a store: sends the requests that events ask for, with a deadline for each answer.

A request waits for the store twice: until the store says which blocks it has, and until the fetched blocks
arrive. The loop keeps a deadline for each wait, so a store that hangs, with all its threads, costs at most
`fetch_timeout_s`.
"""

import numpy as np

from mmengine.core.inbox import Inbox
from mmengine.core.observer import Observer
from mmengine.core.remote_blocks import RemoteBlocks
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.request_state import ASKED, FETCHING
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev


class StoreFetches(Observer):
    """One loop's fetches. `state` is the loop's state."""

    def __init__(self, remote: RemoteBlocks, state: State, inbox: Inbox):
        self._remote, self._state, self._inbox = remote, state, inbox
        self._timeout_ns = int(state.config.fetch_timeout_s * 10**9)
        self._filled: list[np.ndarray] = []  # blocks that the returning step fills
        # blocks of returned steps, with their content ids
        self._computed: list[tuple[np.ndarray, np.ndarray]] = []
        # fetches that are decided and not in the log yet: request id, first block, number of blocks
        self._fetches: list[tuple[str, int, int]] = []

    def before(self, event: ev.Event) -> None:
        if isinstance(event, ev.Executed):
            self._filled = self._state.filled_blocks()

    def after(self, event: ev.Event) -> None:
        match event:
            case ev.Executed():
                self._fill()
            case ev.Queued(request_id=name):
                self._ask(name)
            case ev.Recovered():
                for name in self._state.requests:
                    self._ask(name)
            case ev.Fetched(request_id=name, cached=cached, blocks=blocks):
                self._fetches.append((name, len(cached) // 4, len(blocks) // 4))
                self._inbox.expect_store(name, self._timeout_ns)
            case ev.Offered(request_id=name):
                self._inbox.forget_store(name)
            case ev.Arrived(request_id=name, digests=digests):
                self._remote.accept(name, len(digests) // 8)
                if self._state.requests[name].store != FETCHING:
                    self._inbox.forget_store(name)
            case ev.Lost(request_id=name) | ev.Finished(request_id=name):
                self._inbox.forget_store(name)
                self._remote.forget(name)

    def _fill(self) -> None:
        filled, self._filled = self._filled, []
        if filled:
            blocks = np.unique(np.concatenate(filled))
            self._computed.append((blocks, self._state.blocks.index.content[blocks]))

    def _ask(self, name: str) -> None:
        req_state = self._state.requests[name]
        if req_state.store == ASKED:
            self._inbox.expect_store(name, self._timeout_ns)
            self._remote.ask(req_state.request, req_state.tokens)

    def release(self) -> None:
        """Start the fetches and store the computed blocks, once the log holds their decisions.

        The next step is not dispatched yet, so computed blocks still hold their contents. Blocks that were
        forgotten or reassigned since are not stored.
        """
        computed, self._computed = self._computed, []
        index = self._state.blocks.index
        for blocks, content in computed:
            kept = blocks[(index.content[blocks] == content) & (content != NO_CONTENT)]
            if len(kept):
                self._remote.computed(index, kept)
        fetches, self._fetches = self._fetches, []
        for name, first, count in fetches:
            self._remote.fetch(name, first, count)
