"""The KV blocks of a model whose attention layers all have a sliding window.

Such a model has one block group. Its rows release the blocks before the window. The block table has 0 for
each released block.

A released block stays in the prefix cache until another row overwrites the block. A prefix hit needs all
blocks of the prefix in the cache. After a hit, the request nevertheless shares only the blocks in its window.
"""

import numpy as np

from mmengine.config import EngineConfig


def first_needed(config: EngineConfig, num_computed: np.ndarray | int) -> np.ndarray:
    """Return the number of the first block that a query at token `num_computed` reads. Requires a uniform
    window.
    """
    return np.maximum(num_computed - config.uniform_window + 1, 0) // config.block_size


def num_skipped(config: EngineConfig, num_computed: int) -> int:
    """Return how many leading blocks a row does not hold if its prefix hit has `num_computed` tokens. Without
    a uniform window, the result is 0.
    """
    return int(first_needed(config, num_computed)) if config.uniform_window else 0


def with_skipped(config: EngineConfig, cached: np.ndarray, num_computed: int) -> np.ndarray:
    """Return the first entries of a row's block table: 0 for each skipped block, then the blocks `cached`."""
    skipped = num_skipped(config, num_computed)
    return np.concatenate((np.zeros(skipped, np.int32), cached)) if skipped else cached
