"""A weighted semaphore for asyncio: a task may take several units. Waiting tasks are served in FIFO order."""

import asyncio
from collections import deque


class WeightedSemaphore:
    """A semaphore with `size` units. Belongs to a single event loop."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._size - self._free

    async def take(self, amount: int) -> int:
        """Wait for `amount` units, or for `size` units if `amount` is larger. Take the units and return their
        number, which the caller later passes to `give`.
        """
        amount = min(amount, self._size)
        if not self._waiting and amount <= self._free:
            self._free -= amount
            return amount
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(amount)
            else:
                granted.cancel()
                self.give(0)  # The tasks that follow in the queue may need fewer units.
            raise
        return amount

    def give(self, amount: int) -> None:
        self._free += amount
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():  # The waiting task was cancelled.
                self._waiting.popleft()
            elif wanted <= self._free:
                self._waiting.popleft()
                self._free -= wanted
                granted.set_result(None)
            else:
                return
