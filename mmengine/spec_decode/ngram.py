"""Drafts by prompt lookup (Saxena, 2023): finds an earlier occurrence of a row's last tokens, and proposes
the tokens that followed. The last six tokens are looked up first, then the last three. The latest earlier
occurrence is used.
"""

import numpy as np

from mmengine.ragged import counting
from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.texts import Texts

SIZES = (6, 3)  # n-gram lengths in tokens; shorter n-grams would often match by chance
TABLE_BITS = 12
_WINDOW = np.arange(1 - max(SIZES), 1)


class NgramDrafter:
    """The drafter `ngram`. It needs 64 KiB of memory per row."""

    name = "ngram"
    copies_text = True

    def __init__(self, max_rows: int):
        self._indices = [GramIndex(size, TABLE_BITS, max_rows) for size in SIZES]
        # By row: the number of tokens when `propose` last indexed the n-grams.
        self._indexed = np.zeros(max_rows, np.int64)

    def admit(self, row: int, request: Request, texts: Texts) -> bool:
        for index in self._indices:
            index.clear(row)
        self._indexed[row] = 0
        return True

    def leave(self, row: int, texts: Texts) -> None:
        """Do nothing, because this drafter never uses a row's text for other rows."""

    def propose(self, rows: np.ndarray, texts: Texts, most: np.ndarray) -> Proposed | None:
        lengths = texts.lengths[rows]
        # `places`: the positions at which the n-grams end. An n-gram is indexed once its next token is known,
        # so each row's last n-gram is only looked up.
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
        # If fewer tokens than drafts follow the match, the drafts repeat these tokens.
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
    """Index n-grams, and look up each row's last n-gram. Returns, for each row, the position at which the
    n-gram's previous occurrence ends, or NOWHERE. `grams` [m, n]: `grams[i]` ends at position `places[i]`
    in row `owners[i]`. `grams[last]`: each row's last n-gram, which is only looked up.
    """
    size = index.size
    grams = grams[:, -size:]
    hashes = index.hashes(grams)
    new = places >= size - 1
    new[last] = False
    index.put(owners[new], hashes[new], places[new])
    rows, grams = owners[last], grams[last]
    found = index.get(rows, hashes[last])
    found[places[last] < size] = NOWHERE  # the row has fewer tokens than an n-gram
    if found.max() < 0:
        return found
    there = texts.tokens[rows[:, None], np.maximum(found, size - 1)[:, None] + _WINDOW[-size:]]
    return np.where((there == grams).all(axis=1), found, NOWHERE)
