"""Index arithmetic of ragged columns: parts of different lengths, one behind the other."""

import numpy as np

NO_PLACE = -1  # where an index is expected: there is none


def counting(counts: np.ndarray) -> np.ndarray:
    """0, 1, … of each part: int64 [counts.sum()] for the lengths `counts` [n]."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
