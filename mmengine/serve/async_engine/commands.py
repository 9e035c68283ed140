"""What others ask of an AsyncEngine's own thread, between two steps."""

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from mmengine.errors import InvalidRequest, MMEngineError
from mmengine.serve.engine.engine import Engine
from mmengine.serve.text.request_output import engine_failed

_ANSWER_S = 1.0  # after which it is looked whether the engine is still there
T = TypeVar("T")


class AsyncCommands(Protocol):
    """Part of AsyncEngine."""

    _engine: Engine
    _commands: queue.SimpleQueue[Callable[[], None]]
    _failure: MMEngineError | None
    _closing: bool

    def tell_engine(self, told: Callable[[Engine], None]) -> None:
        """Call it on the engine's thread, before what is asked of that later. It raises nothing."""
        self._commands.put(lambda: told(self._engine))

    async def on_engine(self, asked: Callable[[Engine], T]) -> T:
        """What `asked` gives on the engine's thread. Raises what it raises, RequestFailed where the engine
        failed, InvalidRequest where it is closed."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                answer = partial(told.set_result, asked(self._engine))
            except Exception as error:
                answer = partial(told.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if told.done() else answer())

        self._commands.put(run)
        while True:
            if self._failure is not None:
                raise engine_failed(self._failure)
            if self._closing and not told.done():
                raise InvalidRequest("the engine is closed")
            done, _ = await asyncio.wait([told], timeout=_ANSWER_S)
            if done:
                return told.result()
