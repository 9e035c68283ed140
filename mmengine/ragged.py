"""Index arithmetic for ragged arrays: concatenated sequences of different lengths."""

import numpy as np

NO_PLACE = -1  # stands for a missing index


def counting(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, …, count - 1 for each count in `counts` [n], concatenated: int64 [counts.sum()]."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
