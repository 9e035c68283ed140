"""What an AsyncEngine does with LoRA adapters while it answers: they are read on a thread of their own, one
after the other, and taken up between two steps."""

import asyncio
from concurrent.futures import Executor
from typing import Protocol

from mmengine.serve.async_engine.commands import AsyncCommands
from mmengine.serve.requests.adapters import KnownAdapter


class AsyncAdapters(AsyncCommands, Protocol):
    """Part of AsyncEngine. `_reads_adapters`: of one thread, so that one adapter is in memory at a time, that
    of a caller who went away included."""

    _reads_adapters: Executor

    @property
    def adapters(self) -> tuple[KnownAdapter, ...]:
        """Those that can be asked for. Any thread may ask."""
        return tuple(self._engine.adapters)

    async def load_adapter(self, name: str, source: str) -> KnownAdapter:
        """Read an adapter, which can be asked for when this returns, in place of one that had its name.
        Raises ModelError, ConfigError, InvalidRequest, RequestFailed."""
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._reads_adapters, self._engine.adapters.read, name, source)
        await self.on_engine(lambda engine: engine.adapters.load(known))
        return known

    async def unload_adapter(self, name: str) -> None:
        """Nobody can ask for it any more; requests that have it go on. Raises InvalidRequest for one that is
        not there, RequestFailed."""
        await self.on_engine(lambda engine: engine.adapters.unload(name))
