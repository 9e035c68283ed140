"""The KV blocks of a model whose attention layers all have a sliding window.

Such a model has one block group. Its rows release the blocks before the window. The block table has 0 for
each released block.

A released block stays in the prefix cache until another row overwrites the block. A prefix hit needs all
blocks of the prefix in the cache. After a hit, the request nevertheless shares only the blocks in its window.
"""

import numpy as np

from mmengine.config import EngineConfig


def first_needed(config: EngineConfig, num_computed: np.ndarray) -> np.ndarray:
    """Return the number of the first block that a query at token `num_computed` reads, or 0 without a uniform
    window.
    """
    window = config.uniform_window
    if not window:
        return np.zeros_like(num_computed)
    return np.maximum(num_computed - window + 1, 0) // config.block_size


def num_skipped(config: EngineConfig, num_computed: int) -> int:
    """Return how many leading blocks a row does not hold if its prefix hit has `num_computed` tokens."""
    return int(first_needed(config, np.array(num_computed)))
