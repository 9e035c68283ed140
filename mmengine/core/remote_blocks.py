"""The port between the loop and the threads that fetch blocks from a store."""

from typing import Protocol

import numpy as np

from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.request import Request


class RemoteBlocks(Protocol):
    """Called by the loop's thread. No method waits or raises. Results arrive as OFFERED, ARRIVED and LOST in
    the loop's inbox, from any thread. The loop keeps the deadlines.
    """

    def ask(self, request: Request, tokens: np.ndarray) -> None:
        """Report by OFFERED how many blocks of these known tokens (int32) a store has, from the first block
        on.
        """

    def fetch(self, request_id: str, first: int, count: int) -> None:
        """Fetch blocks [first, first + count) of the request. Report by ARRIVED the blocks that came, in
        order, and by LOST why the rest did not. Blocks in ARRIVED wait for the step that copies them.
        """

    def accept(self, request_id: str, count: int) -> None:
        """Copy the next `count` blocks reported by ARRIVED in the step that is dispatched next."""

    def forget(self, request_id: str) -> None:
        """Stop the work for a request that no longer waits. Accepted blocks are still copied."""

    def computed(self, index: PrefixIndex, blocks: np.ndarray) -> None:
        """Store the contents of these blocks (int [n]). The step that filled them is back, and no dispatched
        step overwrites them.
        """

    def close(self) -> None:
        """Free all resources."""
