"""Draft from a row's own text: find where its last tokens occurred before, and propose the tokens after them.

This is prompt lookup (Saxena, 2023). The longer n-gram length (out of two) wins, and then the last
occurrence.
"""

import numpy as np

from mmengine.ragged import counting
from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.texts import Texts

SIZES = (6, 3)  # matches of two tokens are too often chance
TABLE_BITS = 12
_WINDOW = np.arange(1 - max(SIZES), 1)


class NgramDrafter:
    """Takes 64 KiB per row."""

    name = "ngram"

    def __init__(self, max_rows: int):
        self._indices = [GramIndex(size, TABLE_BITS, max_rows) for size in SIZES]
        # tokens whose n-grams are indexed together with the next token
        self._indexed = np.zeros(max_rows, np.int64)

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        for index in self._indices:
            index.clear(row)
        self._indexed[row] = 0
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """Do nothing: other rows do not use the text."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        lengths = texts.lengths[rows]
        # Positions whose next token became known since the last call, and each row's last position.
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
        # A match near the end of the text continues into the draft itself.
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
    """Return where each row's last tokens occurred before: the position of the last token, or NOWHERE.

    `grams` [m, n] end at `places` [m] in rows `owners`; all except each row's `last` (indices) are added
    to the index.
    """
    size = index.size
    grams = grams[:, -size:]
    hashes = index.hashes(grams)
    new = places >= size - 1
    new[last] = False
    index.put(owners[new], hashes[new], places[new])
    rows, grams = owners[last], grams[last]
    found = index.get(rows, hashes[last])
    found[places[last] < size] = NOWHERE  # the row has too few tokens
    if found.max() < 0:
        return found
    there = texts.tokens[rows[:, None], np.maximum(found, size - 1)[:, None] + _WINDOW[-size:]]
    return np.where((there == grams).all(axis=1), found, NOWHERE)
