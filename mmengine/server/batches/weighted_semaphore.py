"""A FIFO semaphore with weights."""

import asyncio
from collections import deque


class WeightedSemaphore:
    """A semaphore of `size` units. Belongs to a single event loop."""

    def __init__(self, size: int):
        self._size = self._free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._size - self._free

    async def take(self, amount: int) -> int:
        """Wait until `amount` units, at most `size`, are free; take them and return their number. The caller
        frees them with `give`.
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
                self.give(0)  # Tasks after this one in the queue may want fewer units.
            raise
        return amount

    def give(self, amount: int) -> None:
        self._free += amount
        while self._waiting:
            wanted, granted = self._waiting[0]
            if granted.done():  # cancelled
                self._waiting.popleft()
            elif wanted <= self._free:
                self._waiting.popleft()
                self._free -= wanted
                granted.set_result(None)
            else:
                return
