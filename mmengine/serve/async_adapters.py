"""What an AsyncEngine does with LoRA adapters while it answers: they are read on a thread of their own, and
taken up between two steps."""

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from mmengine.errors import MMEngineError
from mmengine.serve.adapters import KnownAdapter
from mmengine.serve.engine import Engine


class AsyncAdapters(Protocol):
    """Part of AsyncEngine."""

    _engine: Engine
    _commands: queue.SimpleQueue[Callable[[], None]]

    @property
    def adapters(self) -> tuple[KnownAdapter, ...]:
        """Those that can be asked for. Any thread may ask."""
        return tuple(self._engine.adapters)

    async def load_adapter(self, name: str, source: str) -> KnownAdapter:
        """Read an adapter, which can be asked for when this returns, in place of one that had its name.
        Raises ModelError, ConfigError, InvalidRequest."""
        known = await asyncio.to_thread(self._engine.adapters.read, name, source)
        await self._done(lambda: self._engine.adapters.load(known))
        return known

    async def unload_adapter(self, name: str) -> None:
        """Nobody can ask for it any more; requests that have it go on. Raises InvalidRequest for one that is
        not there."""
        await self._done(lambda: self._engine.adapters.unload(name))

    async def _done(self, change: Callable[[], None]) -> None:
        """On the engine's thread. Raises what the change raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            error: MMEngineError | None = None
            try:
                change()
            except MMEngineError as refused:
                error = refused
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, done, error)

        self._commands.put(run)
        await done


def _settle(done: "asyncio.Future[None]", error: MMEngineError | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
