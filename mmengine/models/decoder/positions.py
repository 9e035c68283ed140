"""Rotary positions of a prompt without media. No torch here."""

import numpy as np


def text_positions(num_tokens: int) -> tuple[np.ndarray, int]:
    """Places counted from 0 in all three rows, int32 [3, num_tokens], and the delta of output tokens: 0."""
    return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)), 0
