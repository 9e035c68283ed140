"""The port between the loop and whoever fetches blocks of a store, and puts them there, beside it."""

from typing import Protocol

import numpy as np

from mmengine.core.state.prefix_index import PrefixIndex
from mmengine.request import Request


class RemoteBlocks(Protocol):
    """Asked by the loop's thread; none of it waits or raises. What it finds comes back as OFFERED, ARRIVED
    and LOST through the loop's inbox, from whichever thread. The loop itself counts the time."""

    def ask(self, request: Request, tokens: np.ndarray) -> None:
        """Say by OFFERED how many blocks of these known tokens (int32) a store has, from the first on."""

    def fetch(self, request_id: str, first: int, count: int) -> None:
        """Get blocks [first, first + count) of what was asked; say by ARRIVED which came, from the first on,
        and by LOST why the rest did not. Those told of wait for the step that copies them."""

    def accept(self, request_id: str, count: int) -> None:
        """The next blocks that were told by ARRIVED are copied by the step that is dispatched next."""

    def forget(self, request_id: str) -> None:
        """Nobody waits for it any more; what was accepted is copied all the same."""

    def computed(self, index: PrefixIndex, blocks: np.ndarray) -> None:
        """A step that filled these blocks (int [n]) is back, and none was dispatched since that overwrites
        them: keep what they hold."""

    def close(self) -> None:
        """Free what is held."""
