"""An event that happens once."""

import asyncio


class OneShotEvent:
    """An asyncio.Event that is never cleared, and small.

    An asyncio.Event has a queue for waiting tasks from the beginning; here the queue exists only while tasks
    wait. Belongs to an event loop.
    """

    __slots__ = ("_event", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        self.is_set = True
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        if not self.is_set:
            self._event = self._event or asyncio.Event()
            await self._event.wait()
