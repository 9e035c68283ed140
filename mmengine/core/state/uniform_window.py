"""The KV blocks of a model whose attention layers all have a sliding window.

Such a model has one block group. Its rows release the blocks before the window, and the row's block table
then has 0 in place of each released block. So the entries other than 0 are the blocks that a row holds.

A released block stays in the prefix cache until another row overwrites it. A prefix hit needs all blocks of
the prefix in the cache, but a request shares only the blocks that its queries read.
"""

import numpy as np

from mmengine.config import EngineConfig


def first_needed(config: EngineConfig, num_computed: np.ndarray) -> np.ndarray:
    """Return the first block number that a query at token `num_computed` or later reads. Returns 0 if a layer
    sees all keys.
    """
    window = config.uniform_window
    if not window:
        return np.zeros_like(num_computed)
    return np.maximum(num_computed - window + 1, 0) // config.block_size


def num_skipped(config: EngineConfig, num_computed: int) -> int:
    """Return how many blocks at the start of its table a row does not hold if it starts at this token."""
    return int(first_needed(config, np.array(num_computed)))
