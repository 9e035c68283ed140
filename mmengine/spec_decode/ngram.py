"""Drafts from a row's own text: where its last tokens stood before, what followed them follows again.

Prompt lookup (Saxena, 2023). The longest of two lengths counts, and of its places the last.
"""

import numpy as np

from mmengine.request import Request
from mmengine.spec_decode.base import Proposed
from mmengine.spec_decode.index import NOWHERE, GramIndex
from mmengine.spec_decode.texts import Texts

SIZES = (6, 3)  # of two tokens too many are chance
TABLE_BITS = 12


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
        found = np.full(len(rows), NOWHERE, np.int64)
        for index in self._indices:
            self._put(index, rows, texts, lengths)
            open_rows = np.flatnonzero((found == NOWHERE) & (lengths > index.size) & (most > 0))
            if len(open_rows):
                found[open_rows] = _last_place(index, rows[open_rows], texts, lengths[open_rows])
        self._indexed[rows] = lengths
        hits = found != NOWHERE
        if not hits.any():
            return None
        counts = np.where(hits, most, 0)
        # What follows may reach the end of the text: then it goes on as it went on from there.
        start, period = found[hits] + 1, lengths[hits] - 1 - found[hits]
        repeats = counts[hits]
        step = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        places = np.repeat(start, repeats) + step % np.repeat(period, repeats)
        return Proposed(texts.tokens[np.repeat(rows[hits], repeats), places], counts)

    def _put(self, index: GramIndex, rows: np.ndarray, texts: Texts, lengths: np.ndarray) -> None:
        """Grams whose following token is known since the last time."""
        first = np.maximum(self._indexed[rows] - 1, index.size - 1)  # place of a gram's last token
        counts = np.maximum(lengths - 1 - first, 0)
        step = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        places, owners = np.repeat(first, counts) + step, np.repeat(rows, counts)
        if len(places):
            index.put(owners, index.hashes(_grams(index, owners, texts, places)), places)


def _grams(index: GramIndex, rows: np.ndarray, texts: Texts, places: np.ndarray) -> np.ndarray:
    """Tokens [m, size] that end at `places` [m] of rows."""
    return texts.tokens[rows[:, None], places[:, None] + np.arange(1 - index.size, 1)]


def _last_place(index: GramIndex, rows: np.ndarray, texts: Texts, lengths: np.ndarray) -> np.ndarray:
    """Where the last tokens of rows stood before: place of their last token, or NOWHERE."""
    grams = _grams(index, rows, texts, lengths - 1)
    places = index.get(rows, index.hashes(grams))
    known = places >= index.size - 1
    same = _grams(index, rows, texts, np.where(known, places, index.size - 1)) == grams
    return np.where(known & same.all(axis=1), places, NOWHERE)
