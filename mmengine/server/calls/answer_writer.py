"""Writes finished answers to the response store. Answers that end within TOGETHER_S seconds share a write."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice

from mmengine.errors import KeepFailed, MMEngineError
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.calls.detached_call import DetachedCall
from mmengine.server.calls.stored_responses import StoredResponses

TOGETHER_S = 0.5  # Seconds that an answer waits for further answers. Until then, the log has the answer.
AGAIN_S = 1.0  # Seconds until a failed write is repeated.
MAX_TOGETHER = 256  # Maximum number of answers per write.
MAX_WAITING = 256  # If the store fails while this many answers wait, new calls are refused.


class AnswerWriter:
    """A queue of answers that wait to be written to the store. Belongs to a single event loop.

    `stored` is called with the calls whose answers are on disk. The log may then delete these answers.
    """

    def __init__(self, stored_responses: StoredResponses, stored: Callable[[list[DetachedCall]], None]):
        self._kept, self._stored = stored_responses, stored
        self._waiting: dict[DetachedCall, None] = {}
        self._writes = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._error: KeepFailed | None = None

    def check_room(self) -> None:
        """Raise KeepFailed if the store fails and MAX_WAITING answers are waiting."""
        if self._error is not None and len(self._waiting) >= MAX_WAITING:
            raise self._error

    def put(self, call: DetachedCall) -> None:
        self._waiting[call] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def drop(self, call: DetachedCall) -> None:
        """Remove a call from the queue, and wait for a write in progress, which may contain the call."""
        self._waiting.pop(call, None)
        async with self._writes:
            pass

    async def flush(self) -> None:
        """Write all waiting answers now. If a write fails, the remaining answers stay in the queue."""
        async with self._writes:
            while some := list(islice(self._waiting, MAX_TOGETHER)):
                try:
                    await self._kept.put_all([call.answered for call in some])
                except KeepFailed as error:
                    self._error = error
                    operator_log.error("responses not stored", responses=len(some), reason=str(error))
                    return
                self._error = None
                for call in some:
                    self._waiting.pop(call, None)
                self._stored(some)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(TOGETHER_S if self._error is None else AGAIN_S)
            await self.flush()
        self._task = self._error = None


async def log_store_errors(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except MMEngineError as error:  # The next server process tries again.
        operator_log.warning("input of a refused response not deleted", reason=str(error))
