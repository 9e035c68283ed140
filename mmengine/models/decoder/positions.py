"""Computes rotary positions for a prompt without media. Does not import torch."""

import numpy as np


def text_positions(num_tokens: int) -> tuple[np.ndarray, int]:
    """Return a prompt's positions, int32 [3, num_tokens], and the delta for output tokens (see ModelPlugin in
    models/plugin.py). Each row is 0, 1, 2, ..., and the delta is 0.
    """
    return np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)), 0
