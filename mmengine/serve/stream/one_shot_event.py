"""Something that happens once, and that others wait for."""

import asyncio


class OneShotEvent:
    """Like an asyncio.Event that is never cleared, but small: an Event has a queue for whoever waits from its
    beginning to its end, and here it is there while somebody does. Belongs to an event loop."""

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
