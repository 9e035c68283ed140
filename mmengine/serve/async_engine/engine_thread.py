"""Runs AsyncEngine's thread. The thread steps the engine and makes the calls that other threads queue."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmengine.core.resume import Resume
from mmengine.errors import ExecutorFailed, MMEngineError
from mmengine.serve.async_engine.open_requests import OpenRequests
from mmengine.serve.engine.engine import Engine
from mmengine.serve.requests.health import StepClock
from mmengine.serve.requests.operator_log import operator_log
from mmengine.serve.text.request_output import engine_failed

_log = logging.getLogger("mmengine.engine")  # prints to stderr by default
MAX_HANGS = 32  # after more consecutive hangs, all streams end with an error
_POLL_S = 1.0  # how often a waiting caller checks that the thread is alive
T = TypeVar("T")


class EngineThread:
    """Owns and steps the engine. After a hang, a new engine resumes the log, if there is a log.

    `replaced(old_engine)`: called by the watchdog's thread when a new engine has resumed the log.
    `failed(error)`: called when no engine can continue.
    """

    def __init__(
        self,
        model: str | Path | None,
        engine_options: dict[str, Any],
        *,
        replaced: Callable[[Engine], None],
        failed: Callable[[MMEngineError], None],
    ) -> None:
        self._make_engine = partial(Engine, model, **{"on_hang": self._on_hang, **engine_options})
        self.has_log = engine_options.get("log") is not None
        self._replaced, self._failed = replaced, failed
        self.engine = self._make_engine()
        self.step_clock = StepClock()
        self.stats = replace(self.engine.stats())  # counters after the last step
        self.leaves = False  # whether `close` leaves running requests in the log
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_hangs = 0  # consecutive hangs; reset to 0 when a step returns
        self._is_stuck = False  # whether a step hangs in an engine that was not replaced

    def start(self, open_requests: OpenRequests) -> None:
        """Start the thread that steps the engine. After a hang, the watchdog's thread calls this method again
        for the new engine.
        """
        self._open = open_requests
        self._thread = threading.Thread(target=self._run, args=(self.engine,), name="mmengine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call. The engine's thread makes the call between two steps. The call must not raise."""
        self._calls.put(call)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call `function` on the engine's thread and return its result.

        Raises `function`'s errors, RequestFailed if the engine has failed, and InvalidRequest if the engine
        is closed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                settle = partial(result.set_result, function(self.engine))
            except Exception as error:
                settle = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if result.done() else settle())

        self._calls.put(run)
        while not result.done():
            self._open.check_alive()
            await asyncio.wait([result], timeout=_POLL_S)
        return result.result()

    def join(self) -> None:
        """Wait until the thread and its replacements have ended. Does not wait for a hung thread."""
        while (thread := self._thread).is_alive() and not self._is_stuck:
            thread.join(0.05)

    def run_queued(self) -> None:
        """Make all queued calls."""
        while not self._calls.empty():
            self._calls.get()()

    # The methods below run on the engine's thread.

    def _run(self, engine: Engine) -> None:
        open_requests = self._open
        try:
            while not (open_requests.is_closing and (self.leaves or not open_requests)):
                self._run_calls()
                if engine.has_work:
                    self.step_clock.begin()
                    outputs = engine.step(received=False)
                    self.step_clock.end()
                    self._num_hangs = 0
                    self.stats = replace(engine.stats())
                    open_requests.deliver(outputs, self.engine)
                    open_requests.acknowledge(engine)
                if open_requests.is_closing:
                    engine.check_stall()
        except BaseException as error:  # every failure must reach the callers
            if engine is self.engine:
                if not isinstance(error, MMEngineError) or error.__cause__ is not None:
                    _log.critical("the engine died", exc_info=error)
                self._failed(engine_failed(error))
        finally:
            try:
                if engine is self.engine:
                    engine.close()
            except Exception as error:
                self._failed(engine_failed(error))

    def _run_calls(self) -> None:
        """Make all queued calls. If the engine has no work, first wait for a call or for a session's idle
        limit.
        """
        if not self.engine.has_work:
            with suppress(queue.Empty):
                self._calls.get(timeout=self.engine.sessions.idle_s)()
        self.run_queued()

    # The method below runs on the watchdog's thread while the engine's thread hangs in a step.

    def _on_hang(self) -> None:
        stuck = self.engine
        self._num_hangs += 1
        try:
            if not self.has_log or self._num_hangs > MAX_HANGS or not stuck.abandon():
                raise ExecutorFailed(stuck.hang_text)
            operator_log.error("engine hung", reason=stuck.hang_text)
            self.engine = self._make_engine(resume=Resume(awaited=frozenset(self._open.running)))
            self._replaced(stuck)
        except BaseException as error:
            self._failed(engine_failed(error))
            self._is_stuck = True
            return
        self.step_clock.end()
        self.start(self._open)
