"""Releases KV blocks before the sliding window if all layers have a window."""

import numpy as np

from mmengine.core.fold.rows import fill_with_result
from mmengine.core.fold.windows import computed_before_queries
from mmengine.core.state.flight import Flight
from mmengine.core.state.state import State
from mmengine.core.state.uniform_window import first_needed


def release_before_window(state: State, flight: Flight) -> None:
    """In the step's rows, release the blocks that no later query reads. Call this function after the step's
    tokens are applied and rejected drafts are removed.
    """
    rows, table = flight.rows, state.block_table
    needed = first_needed(state.config, computed_before_queries(state, flight))
    if not needed.any():
        return
    if state.config.enable_prefix_caching:
        # The prefix cache can only record blocks that the row still holds. So, before the release, record the
        # blocks that accepted drafts completed.
        late = needed > state.num_filled[rows]
        if late.any():
            fill_with_result(state, rows[late])
        needed = np.minimum(needed, state.num_filled[rows])
    ripe = (needed > 0) & (table[rows, needed - 1] != 0)
    if not ripe.any():
        return
    rows, needed = rows[ripe], needed[ripe]
    # Most blocks before `needed` were released long ago. Comparing all these table entries is cheaper than
    # selecting them by index.
    width = int(needed.max())
    is_released = (table[rows, :width] != 0) & (np.arange(width) < needed[:, None])
    places, numbers = np.divmod(np.flatnonzero(is_released), width)
    owners = rows[places]
    blocks = table[owners, numbers]
    table[owners, numbers] = 0
    state.blocks.release_shared(blocks)
