"""Allocates and finds the KV blocks of several block groups by vLLM's rules.

When a row's next chunk is scheduled, the row first frees the blocks before its windows, then gets new blocks.
Tokens in flight do not count as computed when the row frees blocks. A window group's block is found by a hash
over all tokens up to the block's end, even if the first group has no block with these tokens. If several
blocks have the hash, the block that was recorded first is used.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Protocol

import numpy as np

from mmengine.core.state.columns import ReadOnlyArray
from mmengine.core.state.prefix_index import NO_BLOCK, NO_CONTENT
from mmengine.core.state.window_blocks import WindowIndex

_DIGEST_BYTES = 7  # A digest times the number of groups must fit into 64 bits.


def chain_digests(parent: int, tokens: np.ndarray, extras: Mapping[int, bytes]) -> list[int]:
    """Return a digest for each block in a sequence. A digest also depends on all earlier blocks.

    `parent`: the preceding block's digest, or 0. `tokens`: each block's tokens, int32 [n, width]. `extras`:
    index into `tokens` -> additional bytes for the hash.
    """
    digests = []
    for number, row in enumerate(tokens):
        text = parent.to_bytes(_DIGEST_BYTES, "little") + row.tobytes() + extras.get(number, b"")
        parent = int.from_bytes(blake2b(text, digest_size=_DIGEST_BYTES).digest(), "little")
        digests.append(parent)
    return digests


class LazyWindowIndex(WindowIndex):
    """Finds blocks by digests from `chain_digests`, for groups with a window."""

    def __init__(self, num_blocks: int, num_groups: int):
        super().__init__(num_blocks, num_groups)
        self._blocks_of: dict[int, dict[int, None]] = {}  # key -> blocks, first recorded first

    def find(self, contents: np.ndarray) -> np.ndarray:
        keys = contents * self.num_groups + np.arange(self.num_groups)[:, None]
        found = [next(iter(self._blocks_of.get(key, ())), NO_BLOCK) for key in keys.ravel().tolist()]
        return np.array(found, np.int32).reshape(keys.shape)

    def insert(self, blocks: np.ndarray, contents: np.ndarray) -> None:
        keys = contents * self.num_groups + np.arange(self.num_groups)[:, None]
        known = blocks != 0
        self.restore(blocks[known], keys[known])

    def forget(self, blocks: np.ndarray) -> None:
        keys = self.keys[blocks]
        self.keys[blocks] = NO_CONTENT
        for key, block in zip(keys.tolist(), blocks.tolist(), strict=True):
            if key != NO_CONTENT:
                same = self._blocks_of[key]
                del same[block]
                if not same:
                    del self._blocks_of[key]

    def clear(self) -> None:
        super().clear()
        self._blocks_of.clear()

    def recorded(self) -> np.ndarray:
        return np.fromiter(chain.from_iterable(self._blocks_of.values()), np.intp)

    def restore(self, blocks: np.ndarray, keys: np.ndarray) -> None:
        self.keys[blocks] = keys
        for key, block in zip(keys.tolist(), blocks.tolist(), strict=True):
            self._blocks_of.setdefault(key, {})[block] = None


class _Flight(Protocol):
    @property
    def rows(self) -> ReadOnlyArray: ...
    @property
    def num_scheduled(self) -> ReadOnlyArray | None: ...


class Rows(Protocol):
    """The attributes that `settled_tokens` reads from a state or from a state's view."""

    @property
    def num_computed(self) -> ReadOnlyArray: ...
    @property
    def flights(self) -> Sequence[_Flight]: ...


def settled_tokens(state: Rows, rows: ReadOnlyArray) -> np.ndarray:
    """Return each row's number of computed tokens, not counting steps in flight."""
    computed = np.asarray(state.num_computed[rows])
    if not state.flights:
        return computed
    flying = np.zeros(len(state.num_computed), np.int32)
    for flight in state.flights:
        if flight.num_scheduled is not None:
            flying[np.asarray(flight.rows)] += np.asarray(flight.num_scheduled)
    return np.maximum(computed - flying[np.asarray(rows)], 0)
