"""Drafts from earlier answers: finds a row's last tokens in the answer to another request, and proposes the
tokens that followed.

The idea is SuffixDecoding (Oliaro et al., 2024), but with a ring buffer instead of suffix trees. For each
n-gram length, a hash table maps n-grams to their last occurrence. Only answers to requests with the same
cache_salt are used.
"""

import hashlib

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.texts import Texts

SIZES = (10, 5, 3)  # n-gram lengths in tokens; the longest match is used
END = -1  # the value after each answer in the ring
RING_BITS, TABLE_BITS = 18, 18
_WINDOW = np.arange(-max(SIZES), 0)


class SuffixDrafter:
    """The drafter `suffix`, which keeps the last 2^18 answer tokens in 10 MiB."""

    name = "suffix"
    copies_text = True

    def __init__(self, max_rows: int, ring_bits: int = RING_BITS, table_bits: int = TABLE_BITS):
        self._ring = np.full(1 << ring_bits, END, np.int32)
        # For each token in the ring, a hash of its request's cache_salt.
        self._salts = np.zeros(len(self._ring), np.uint64)
        self._head = 0  # number of tokens that were written so far
        self._indices = [GramIndex(size, table_bits) for size in SIZES]
        self._row_salts = np.zeros(max_rows, np.uint64)
        self._is_followed = np.zeros(max_rows, bool)

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        self._row_salts[row] = _number(request.cache_salt)
        self._is_followed[row] = True
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """Add the row's answer to the ring, before the row is assigned to another request."""
        if self._is_followed[row]:
            self._keep(texts.tokens[row, texts.num_prompt[row] : texts.lengths[row]], self._row_salts[row])
            self._is_followed[row] = False

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        if not self._head or not most.any():
            return None
        lengths = texts.lengths[rows]
        said, salts = lengths - texts.num_prompt[rows], self._row_salts[rows]
        ends = texts.tokens[rows[:, None], np.maximum(lengths[:, None] + _WINDOW, 0)]
        found = np.full(len(rows), NOWHERE, np.int64)
        for index in self._indices:
            is_open = (found == NOWHERE) & (said >= index.size)
            if is_open.any():
                found = np.where(is_open, self._find(index, ends[:, -index.size :], salts), found)
        hits = np.flatnonzero(found != NOWHERE)
        if not len(hits):
            return None
        width = int(most[hits].max())
        places = found[hits, None] + 1 + np.arange(width)
        drafts = self._ring[places & (len(self._ring) - 1)]
        there = (drafts != END) & (places < self._head) & (np.arange(width) < most[hits, None])
        there = np.logical_and.accumulate(there, axis=1)
        counts = np.zeros(len(rows), np.intp)
        counts[hits] = there.sum(axis=1)
        return Proposed(drafts[there], counts) if counts.any() else None

    def _keep(self, answer: np.ndarray, salt: np.uint64) -> None:
        answer = np.append(answer[-(len(self._ring) // 4) :], END)
        places = self._head + np.arange(len(answer))
        self._ring[places & (len(self._ring) - 1)] = answer
        self._salts[places & (len(self._ring) - 1)] = salt
        self._head += len(answer)
        for index in self._indices:
            if len(answer) > index.size:
                grams = np.lib.stride_tricks.sliding_window_view(answer[:-1], index.size)
                index.put(0, index.hashes(grams, salt), places[index.size - 1 : -1])

    def _find(self, index: GramIndex, grams: np.ndarray, salts: np.ndarray) -> np.ndarray:
        """Return the index at which each n-gram in `grams` [m, size] last ends in the ring, or NOWHERE."""
        places = index.get(0, index.hashes(grams, salts))
        alive = (places != NOWHERE) & (places - index.size >= self._head - len(self._ring))
        if not alive.any():
            return np.full(len(places), NOWHERE)
        at = (places[:, None] + np.arange(1 - index.size, 1)) & (len(self._ring) - 1)
        same = (self._ring[at] == grams).all(axis=1) & (self._salts[at[:, -1]] == salts)
        return np.where(alive & same, places, NOWHERE)


def _number(salt: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little"))
