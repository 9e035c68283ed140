"""From the records of a log to batches of KV events: a fold beside the state's.

A block is told of when the step that computed it is EXECUTED, not when it is scheduled: until then others
may hit it within this engine, whose next step comes behind that one, but nobody outside. It is taken back
with the event that gives it to somebody else. Each record makes one batch or none, so the number of a batch
follows from the log: a reader that begins anew counts the same.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from mmengine.core.state.block_digest import ContentDigests, event_hash
from mmengine.core.state.blocks import OF_ADAPTER, OF_SALT
from mmengine.core.state.prefix_index import NO_CONTENT
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.replay.kv_events.wire import (
    DEVICE,
    MAX_EVENT_BLOCKS,
    SALT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
    KVEvent,
    media_id_of,
)

MAX_SALTS = 4096  # whose words are remembered; of an older one routers hear the hash
Key = TypeVar("Key", int, bytes)
_PART = struct.Struct("<Iqq")  # as core/state/blocks.py writes the parts of an extra


class KVProjection:
    """Of one log. `state` is the one that the caller folds: `before` and `after` each event."""

    def __init__(self, state: State):
        index = state.blocks.index
        self._state, self._index = state, index
        self._digests = ContentDigests(index, state.block_size)
        self._content = index.content.copy()  # as of the event before
        self._is_told = np.zeros(len(index.content), bool)  # by block: it was computed, and holds that
        self._holders: Counter[int] = Counter()  # blocks that hold a content
        # Those of them that are told, by their digest: with a drafter that keeps KV a content has the next
        # token in it too, and several have one digest.
        self._tellers: Counter[bytes] = Counter()
        self._filled: Iterable[np.ndarray] = ()
        self._salts: dict[bytes, str] = {}
        self._adapters: dict[bytes, str] = {}  # names by digest
        held = np.flatnonzero(self._content != NO_CONTENT)  # in a log whose beginning is gone
        self._digests.add(held)
        self._holders.update(self._content[held].tolist())

    def first(self) -> list[KVEvent]:
        """What a router is told at the beginning: what it knew of this engine is no more. Where the log's
        own beginning is gone, it hears of what is there."""
        state = self._state
        awaited = [*state.step_filled, *(blocks for flight in state.flights for blocks in flight.filled)]
        held = np.flatnonzero(self._content != NO_CONTENT)
        self._filled = [np.setdiff1d(held, np.concatenate(awaited)) if awaited else held]
        return [AllBlocksCleared(), *self._stored()]

    def before(self, event: ev.Event) -> None:
        """The event is about to be applied."""
        state = self._state
        if isinstance(event, ev.Executed):
            self._filled = state.filled_blocks()
        elif isinstance(event, ev.Queued):
            if event.cache_salt:
                digest = hashlib.sha256(event.cache_salt.encode()).digest()
                _remember(self._salts, digest, event.cache_salt)
            if event.adapter is not None:
                _remember(self._adapters, event.adapter.digest, event.adapter.name)

    def after(self, event: ev.Event) -> list[KVEvent]:
        """It was applied: what it changed for who asks from outside."""
        if isinstance(event, (ev.Recovered, ev.CacheReset)):
            self._forget_all()
            return [AllBlocksCleared()]
        told: list[KVEvent] = []
        changed = np.flatnonzero(self._index.content != self._content)
        if len(changed):
            removed = self._change(changed)
            if removed:
                told.append(BlockRemoved(removed, DEVICE))
        if isinstance(event, ev.Executed):
            told += self._stored()
        return told

    def _forget_all(self) -> None:
        self._content[:] = self._index.content
        self._is_told[:] = False
        self._holders.clear()
        self._tellers.clear()
        self._digests.clear()
        self._filled = ()

    def _change(self, changed: np.ndarray) -> list[int]:
        """These blocks hold something else than before; gives the hashes of what cannot be hit any more."""
        before, now = self._content[changed], self._index.content[changed]
        self._digests.add(changed)
        self._holders.update(now[now != NO_CONTENT].tolist())
        removed = []
        for block, content in zip(changed.tolist(), before.tolist(), strict=True):
            if content == NO_CONTENT:
                continue
            digest = self._digests.get(content)
            if self._is_told[block] and digest is not None and _less(self._tellers, digest):
                removed.append(event_hash(digest))
            if _less(self._holders, content):
                self._digests.drop(content)
        self._is_told[changed] = False
        self._content[changed] = now
        return removed

    def _stored(self) -> Iterator[KVEvent]:
        """Of the blocks that the step filled those whose content nobody was told of."""
        filled, self._filled = list(self._filled), ()
        if not filled:
            return
        blocks = np.unique(np.concatenate(filled))
        blocks = blocks[(self._content[blocks] != NO_CONTENT) & ~self._is_told[blocks]]
        content, parents, _, _ = self._index.columns()
        chain: list[int] = []
        for block in blocks[np.argsort(content[blocks], kind="stable")].tolist():
            digest = self._digests.get(int(content[block]))
            if digest is None:  # what it stands behind is gone from the log
                continue
            self._is_told[block] = True
            self._tellers[digest] += 1
            if self._tellers[digest] > 1:
                continue
            goes_on = chain and int(parents[block]) == int(content[chain[-1]])
            if chain and (not goes_on or len(chain) == MAX_EVENT_BLOCKS):
                yield self._told_of(chain)
                chain = []
            chain.append(block)
        if chain:
            yield self._told_of(chain)

    def _told_of(self, chain: list[int]) -> BlockStored:
        content, parents, tokens, _ = self._index.columns()
        size, blocks = self._state.block_size, np.array(chain)
        digests = [self._digests.get(held) or b"" for held in content[blocks].tolist()]
        before = int(parents[chain[0]])
        parent = None if before == 0 else event_hash(self._digests.get(before) or b"")
        return BlockStored(
            [event_hash(digest) for digest in digests],
            parent,
            tokens[blocks, :size].ravel().tolist(),
            size,
            None,
            DEVICE,
            None,
            [self._extra_keys(self._index.extra.get(block, b"")) for block in chain],
        )

    def _extra_keys(self, extra: bytes) -> ExtraKeys | None:
        """vLLM's words for what a block's tokens do not say: each media item once, by where its first run in
        the block begins, and the salt last."""
        items: dict[str, int] = {}
        salts: list[str] = []
        adapters: list[str] = []
        while extra:
            length, place, embedding = _PART.unpack(extra[-_PART.size :])
            extra = extra[: -_PART.size]
            name, extra = extra[len(extra) - length :], extra[: len(extra) - length]
            if embedding == OF_SALT:
                salts.append(SALT + self._salts.get(name, name.hex()))
            elif embedding == OF_ADAPTER:
                adapters.append(self._adapters.get(name) or name.hex())
            else:  # from the last to the first
                media_id = media_id_of(name)
                items.pop(media_id, None)
                items[media_id] = place
        return [*adapters, *reversed(items.items()), *salts] or None


def _remember(names: dict[bytes, str], digest: bytes, name: str) -> None:
    if len(names) >= MAX_SALTS:
        del names[next(iter(names))]
    names[digest] = name


def _less(counts: Counter[Key], held: Key) -> bool:
    """One less holds it; whether nobody does."""
    counts[held] -= 1
    if counts[held] > 0:
        return False
    del counts[held]
    return True
