"""Rotary positions for a prompt without media. No torch here."""

import numpy as np


def text_positions(num_tokens: int) -> tuple[np.ndarray, int]:
    """Return positions counted from 0 in all three rows, int32 [3, num_tokens], and the delta for output
    tokens: 0.
    """
    return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)), 0
