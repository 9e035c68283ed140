"""The interface between the engine's loop and the threads that fetch blocks from a block store."""

from typing import Protocol

import numpy as np

from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.request import Request


class RemoteBlocks(Protocol):
    """A block store's client. The loop's thread calls its methods, which neither wait nor raise. Results
    arrive as OFFERED, ARRIVED and LOST in the loop's inbox, from any thread. The loop keeps the deadlines.
    """

    def ask(self, request: Request, tokens: np.ndarray) -> None:
        """Find out how many blocks the store has for these tokens (int32), from the first block on, and
        report OFFERED.
        """

    def fetch(self, request_id: str, first: int, count: int) -> None:
        """Fetch blocks [first, first + count) of the request. Report ARRIVED for blocks that have arrived, in
        order, and LOST if the rest cannot be fetched. Arrived blocks wait for the step that copies them.
        """

    def accept(self, request_id: str, count: int) -> None:
        """Let the step that is dispatched next copy the next `count` blocks that were reported by ARRIVED."""

    def forget(self, request_id: str) -> None:
        """Stop the work for a request that no longer waits. Blocks that were passed to `accept` are still
        copied."""

    def computed(self, index: PrefixIndex, blocks: np.ndarray) -> None:
        """Write the contents of these blocks (int [n]) to the store. The step that filled them has returned,
        and no dispatched step overwrites them.
        """

    def close(self) -> None:
        """Free all resources."""
