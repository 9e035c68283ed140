"""An asyncio event that happens once and uses little memory."""

import asyncio


class OneShotEvent:
    """Like an asyncio.Event that is never cleared, but smaller.

    An asyncio.Event always has a queue for waiting tasks. Here the queue exists only while tasks wait. Only a
    single event loop may use an instance.
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
