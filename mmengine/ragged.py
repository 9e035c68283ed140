"""Index arithmetic for ragged arrays, in which parts with different lengths follow one another."""

import numpy as np

NO_PLACE = -1  # as an index: there is none


def counting(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, …, count - 1 for each count in `counts` [n], one part after the other: int64
    [counts.sum()].
    """
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
