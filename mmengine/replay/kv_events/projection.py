"""Derives KV event batches, in vLLM's format, from the records of a log.

A block is announced when its step is EXECUTED, not when the step is scheduled. Before EXECUTED, only requests
of this engine may hit the block, because their steps run after the step that fills the block. The record that
changes a block's content also revokes the block's announcement. Each record creates at most one batch, so a
reader that starts again gets the same batch numbers.
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

# Maximum number of remembered salts, and of adapter names. Routers receive hashes in place of older salts and
# names.
MAX_SALTS = 4096
Key = TypeVar("Key", int, bytes)
# The layout of the parts of a block's extra key. core/state/blocks.py writes this layout.
_PART = struct.Struct("<Iqq")


class KVProjection:
    """Derives a log's KV events. For each event, the caller calls `before`, applies the event to `state`, and
    calls `after`.
    """

    def __init__(self, state: State):
        index = state.blocks.index
        self._state, self._index = state, index
        self._digests = ContentDigests(index, state.block_size)
        self._content = index.content.copy()  # The content of each block before the current event.
        self._is_announced = np.zeros(len(index.content), bool)  # Indexed by block.
        self._holders: Counter[int] = Counter()  # Maps a content to the number of blocks that hold it.
        # Maps a digest to the number of announced blocks with this digest. With a drafter that has a KV
        # cache, a content also includes the token after the block, but the digest does not. Several contents
        # can then have the same digest.
        self._announced: Counter[bytes] = Counter()
        self._filled: Iterable[np.ndarray] = ()
        self._salts: dict[bytes, str] = {}
        self._adapters: dict[bytes, str] = {}  # Maps an adapter's digest to its name.
        # `held` has blocks only if the log's beginning was deleted.
        held = np.flatnonzero(self._content != NO_CONTENT)
        self._digests.add(held)
        self._holders.update(self._content[held].tolist())

    def first(self) -> list[KVEvent]:
        """Return the first batch's events, which tell a router to forget all blocks of this engine.

        If the log's beginning was deleted, the batch also announces the blocks that are present.
        """
        state = self._state
        awaited = [*state.step_filled, *(blocks for flight in state.flights for blocks in flight.filled)]
        held = np.flatnonzero(self._content != NO_CONTENT)
        self._filled = [np.setdiff1d(held, np.concatenate(awaited)) if awaited else held]
        return [AllBlocksCleared(), *self._stored()]

    def before(self, event: ev.Event) -> None:
        """Prepare for an event that is about to be applied."""
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
        """Return the KV events for an event that was just applied."""
        if isinstance(event, (ev.Recovered, ev.CacheReset)):
            self._forget_all()
            return [AllBlocksCleared()]
        events: list[KVEvent] = []
        changed = np.flatnonzero(self._index.content != self._content)
        if len(changed):
            removed = self._change(changed)
            if removed:
                events.append(BlockRemoved(removed, DEVICE))
        if isinstance(event, ev.Executed):
            events += self._stored()
        return events

    def _forget_all(self) -> None:
        self._content[:] = self._index.content
        self._is_announced[:] = False
        self._holders.clear()
        self._announced.clear()
        self._digests.clear()
        self._filled = ()

    def _change(self, changed: np.ndarray) -> list[int]:
        """Record the new contents of these blocks, and return the hashes that no block has any more."""
        before, now = self._content[changed], self._index.content[changed]
        self._digests.add(changed)
        self._holders.update(now[now != NO_CONTENT].tolist())
        removed = []
        for block, content in zip(changed.tolist(), before.tolist(), strict=True):
            if content == NO_CONTENT:
                continue
            digest = self._digests.get(content)
            if self._is_announced[block] and digest is not None and _decrement(self._announced, digest):
                removed.append(event_hash(digest))
            if _decrement(self._holders, content):
                self._digests.drop(content)
        self._is_announced[changed] = False
        self._content[changed] = now
        return removed

    def _stored(self) -> Iterator[KVEvent]:
        """Yield events for the blocks that the step filled and that are not announced yet."""
        filled, self._filled = list(self._filled), ()
        if not filled:
            return
        blocks = np.unique(np.concatenate(filled))
        blocks = blocks[(self._content[blocks] != NO_CONTENT) & ~self._is_announced[blocks]]
        content, parents, _, _ = self._index.columns()
        chain: list[int] = []
        for block in blocks[np.argsort(content[blocks], kind="stable")].tolist():
            digest = self._digests.get(int(content[block]))
            if digest is None:  # The preceding blocks' tokens are in the log's deleted beginning.
                continue
            self._is_announced[block] = True
            self._announced[digest] += 1
            if self._announced[digest] > 1:
                continue
            continues = chain and int(parents[block]) == int(content[chain[-1]])
            if chain and (not continues or len(chain) == MAX_EVENT_BLOCKS):
                yield self._block_stored(chain)
                chain = []
            chain.append(block)
        if chain:
            yield self._block_stored(chain)

    def _block_stored(self, chain: list[int]) -> BlockStored:
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
        """Return the extra keys of a block in vLLM's format.

        The order is: adapters, media items, salt. A media item's entry has the position in the block at which
        the item begins.
        """
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
            else:  # The parts are stored from last to first.
                media_id = media_id_of(name)
                items.pop(media_id, None)
                items[media_id] = place
        return [*adapters, *reversed(items.items()), *salts] or None


def _remember(names: dict[bytes, str], digest: bytes, name: str) -> None:
    if len(names) >= MAX_SALTS:
        del names[next(iter(names))]
    names[digest] = name


def _decrement(counts: Counter[Key], held: Key) -> bool:
    """Decrement a count, and return whether it is now 0."""
    counts[held] -= 1
    if counts[held] > 0:
        return False
    del counts[held]
    return True
