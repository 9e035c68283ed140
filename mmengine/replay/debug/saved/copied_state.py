"""Copies a state's objects for the debugger. The debugger uses these copies after a decision that breaks a
rule, because a snapshot may then fail.
"""

from copy import deepcopy

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mmengine.core.state.state import State


class CopiedState:
    """A copy of a state's objects, without the trailing zeros in rows of `token_ids` and `block_table`."""

    def __init__(self, state: State):
        self._state = _copied(state)
        self._rows = [
            (row, _trimmed(state.token_ids[row]), _trimmed(state.block_table[row]))
            for row in range(state.config.num_rows)
        ]
        self._shapes = state.token_ids.shape, state.block_table.shape
        known = sum(len(each.tokens) for each in state.requests.values())
        kept = sum(tokens.nbytes + table.nbytes for _, tokens, table in self._rows)
        width = state.content_width
        self.num_bytes = kept + 4 * known + state.config.num_blocks * (4 * width + 64) + 65536
        self.num_bytes += state.windows.tables.nbytes

    def restore(self) -> State:
        state = _copied(self._state)
        tokens, table = (np.zeros(shape, np.int32) for shape in self._shapes)
        for row, known, blocks in self._rows:
            tokens[row, : len(known)], table[row, : len(blocks)] = known, blocks
        windows = sliding_window_view(tokens, state.content_width, axis=1)
        state.__dict__.update(
            token_ids=tokens, block_table=table, block_tokens=windows[:, :: state.config.block_size]
        )
        return state


def _trimmed(values: np.ndarray) -> np.ndarray:
    """Return a copy of the array without the zeros at the end."""
    used = np.flatnonzero(values)
    return values[: int(used[-1]) + 1 if len(used) else 0].copy()


def _copied(state: State) -> State:
    """Return a deep copy of the state without `token_ids`, `block_table` and `block_tokens`. Requests and
    settings are shared, because they never change.
    """
    shared = [state.config, state.constants, state.policy]
    shared += [req_state.request for req_state in state.requests.values()]
    steps = [state.step_encoded, *(flight.encoded for flight in state.flights)]
    shared += [request for encoded in steps for _, request, _ in encoded]
    memo: dict[int, object] = {id(each): each for each in shared}
    for name in ("token_ids", "block_table", "block_tokens"):
        memo[id(getattr(state, name))] = None
    return deepcopy(state, memo)
