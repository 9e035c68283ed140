"""Drafts from a row's own text: where its last tokens stood before, what followed them follows again.

Prompt lookup (Saxena, 2023). The longest of two lengths counts, and of its places the last.
"""

import numpy as np

from mmengine.ragged import counting
from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.texts import Texts

SIZES = (6, 3)  # of two tokens too many are chance
TABLE_BITS = 12
_WINDOW = np.arange(1 - max(SIZES), 1)


class NgramDrafter:
    """Takes 64 KiB a row."""

    name = "ngram"

    def __init__(self, max_rows: int):
        self._indices = [GramIndex(size, TABLE_BITS, max_rows) for size in SIZES]
        self._indexed = np.zeros(max_rows, np.int64)  # tokens whose grams are known, with what follows them

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        for index in self._indices:
            index.clear(row)
        self._indexed[row] = 0
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """Its text is nothing to others."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        lengths = texts.lengths[rows]
        # Places whose following token came to be known since the last time, and of each row the last one.
        first = np.maximum(self._indexed[rows] - 1, 0)
        counts = lengths - first
        self._indexed[rows] = lengths
        ends = np.cumsum(counts)
        places = np.arange(int(ends[-1])) + np.repeat(lengths - ends, counts)
        owners = np.repeat(rows, counts)
        grams = texts.tokens[owners[:, None], np.maximum(places[:, None] + _WINDOW, 0)]
        found = np.full(len(rows), NOWHERE, np.int64)
        for index in self._indices:
            placed = _look(index, owners, places, grams, ends - 1, texts)
            found = np.where(found == NOWHERE, placed, found)
        hits = (found != NOWHERE) & (most > 0)
        if not hits.any():
            return None
        counts = np.where(hits, most, 0)
        # What follows may reach the end of the text: then it goes on as it went on from there.
        start, period = found[hits] + 1, lengths[hits] - 1 - found[hits]
        repeats = counts[hits]
        places = np.repeat(start, repeats) + counting(repeats) % np.repeat(period, repeats)
        return Proposed(texts.tokens[np.repeat(rows[hits], repeats), places], counts)


def _look(
    index: GramIndex,
    owners: np.ndarray,
    places: np.ndarray,
    grams: np.ndarray,
    last: np.ndarray,
    texts: Texts,
) -> np.ndarray:
    """Where the last tokens of each row stood before: place of their last token, or NOWHERE. `grams` [m, n]
    end at `places` [m] of rows `owners`; all but the `last` of each row (into them) are put down."""
    size = index.size
    grams = grams[:, -size:]
    hashes = index.hashes(grams)
    new = places >= size - 1
    new[last] = False
    index.put(owners[new], hashes[new], places[new])
    rows, grams = owners[last], grams[last]
    found = index.get(rows, hashes[last])
    found[places[last] < size] = NOWHERE  # it has no tokens before these
    if found.max() < 0:
        return found
    there = texts.tokens[rows[:, None], np.maximum(found, size - 1)[:, None] + _WINDOW[-size:]]
    return np.where((there == grams).all(axis=1), found, NOWHERE)
