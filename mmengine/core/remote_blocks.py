"""The interface between the engine's loop and the threads that read and write KV blocks in a block store."""

from typing import Protocol

import numpy as np

from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.request import Request


class RemoteBlocks(Protocol):
    """A block store's client. Only the engine loop's thread calls the methods. The methods never wait and
    never raise.

    The client's threads report results as OFFERED, ARRIVED and LOST events in the loop's inbox. The loop sets
    a deadline for each reply.
    """

    def ask(self, request: Request, tokens: np.ndarray) -> None:
        """Ask the store how many leading blocks of these tokens (int32) it has, and report the number as
        OFFERED.
        """

    def fetch(self, request_id: str, first: int, count: int) -> None:
        """Fetch the request's blocks [first, first + count).

        Reports ARRIVED for arrived blocks, in order, and LOST if the remaining blocks cannot be fetched. The
        client keeps arrived blocks until a step copies them.
        """

    def accept(self, request_id: str, count: int) -> None:
        """Let the next dispatched step copy `count` more arrived blocks."""

    def forget(self, request_id: str) -> None:
        """Stop the work for a request that no longer waits. Accepted blocks are still copied."""

    def computed(self, index: PrefixIndex, blocks: np.ndarray) -> None:
        """Write the contents of `blocks` (int [n]) to the store. The blocks are complete, and no dispatched
        step overwrites them.
        """

    def close(self) -> None:
        """Stop the threads and free all resources."""
