"""Requests blocks from a block store, writes computed blocks, and sets a deadline for each reply.

A request waits for the store twice: first for the number of available blocks, then for the fetched blocks.
Each wait ends after `fetch_timeout_s`, even if the store and all threads of its client hang.
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
    """Observes an engine's events, and starts fetches and writes. `state`: the engine's state."""

    def __init__(self, remote: RemoteBlocks, state: State, inbox: Inbox):
        self._remote, self._state, self._inbox = remote, state, inbox
        self._timeout_ns = int(state.config.fetch_timeout_s * 10**9)
        self._filled: list[np.ndarray] = []  # blocks that the current step has filled
        # (filled blocks, their content ids) for each step since the last `release`
        self._computed: list[tuple[np.ndarray, np.ndarray]] = []
        # (request id, first block, number of blocks) for decided fetches that have not started
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
        """Start the decided fetches, and write computed blocks to the store. Call this method after the
        events are committed, but before the next step is dispatched, because that step may overwrite the
        blocks.

        A computed block is skipped if its content has changed meanwhile.
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
