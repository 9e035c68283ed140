"""Runs the server process: warms up the engine, listens, handles calls until a signal arrives, and shuts
down.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from mmengine.errors import ExecutorFailed, MMEngineError
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.app.app import App
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle.heartbeat import BEAT_S, Beat, HeartbeatSender
from mmengine.server.lifecycle.process_end import end_process_after
from mmengine.server.lifecycle.warm_up import WARM_UP_TOKENS, warm_up, warm_up_meanwhile
from mmengine.server.lifecycle.web_server import web_server
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage
from mmengine.server.transport.open_files import raise_limit

if TYPE_CHECKING:  # OpenTelemetry is an extra
    from mmengine.server.calls.tracing import Tracing

# Seconds that a thread may keep the interpreter lock while the event loop waits for the lock. Python's
# default is 5 ms.
SWITCH_S = 0.0005
CLOSE_S = 4.0  # Maximum seconds for closing the engine after drain_s. After this time, the process ends.
LOOK_S = 0.05  # Seconds between two checks of whether a heartbeat is due.
COLLECTED = (5000, 2, 10)  # Thresholds of the garbage collector. Collecting 5,000 objects takes 0.5 ms.


def run(serving: Coroutine[None, None, None]) -> None:
    """Run the coroutine `serving` (see `serve`) on a uvloop event loop."""
    raise_limit()
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(serving)


async def serve(
    engine: ServedEngine,
    settings: ServerSettings,
    keys: ApiKeys,
    names: tuple[str, ...],
    bound: socket.socket,
    listening: Callable[[], None],
    media_fetcher: MediaFetcher | None = None,
    open_storage: Callable[[], Storage] | None = None,
    heartbeats: HeartbeatSender | None = None,
    in_haste: bool = False,
    live: Path | None = None,
    admin_keys: ApiKeys | None = None,
    health_socket: socket.socket | None = None,
) -> None:
    """Handle calls until a signal arrives, then close the engine.

    `listening` is called when the server listens. `media_fetcher`: fetches media from URLs and local files.
    `open_storage`: opens the store beside the log. `heartbeats`: sends heartbeats to a supervisor.
    `in_haste`: handle calls even during the warm-up, because clients have been waiting since the previous
    process's end. `live`: the log folder that /live shows. `admin_keys`: keys that may load adapters; SIGHUP
    reloads them and `keys`. `health_socket`: the health port's listening socket; None if a supervisor serves
    the health port. Raises ExecutorFailed if the engine fails; the supervisor then starts a new process.
    """
    pulse = _Pulse(engine, heartbeats)
    tasks, storage = [asyncio.create_task(pulse.beat())], None
    tracing = _tracing(settings, engine)
    try:
        storage = open_storage() if open_storage is not None else None
        if in_haste:
            tasks.append(asyncio.create_task(warm_up_meanwhile(engine, settings.chat_template)))
            _collect_rarely()  # A full collection would take long and find few objects.
        else:
            await warm_up(engine, settings.chat_template)
            freeze_garbage()
        app = App(engine, settings, keys, names, media_fetcher, storage, tracing, live, admin_keys)
        # The application itself logs the errors that uvicorn would log here.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server = web_server(app, settings, health_socket)
        server.on_exit = partial(end_process_after, settings.drain_s + CLOSE_S)
        pulse.app, pulse.server = app, server
        with suppress(NotImplementedError, ValueError):  # Raised outside the main thread.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, keys, admin_keys)
        running = asyncio.create_task(app.run())
        tasks.append(asyncio.create_task(_tell(server, listening)))
        try:
            await server.serve(sockets=[bound])
        finally:
            running.cancel()
            # When `app.run` has ended, batches have written their answers to disk.
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await engine.close(leave=True)
        if storage is not None:
            storage.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        for task in tasks:
            task.cancel()
    if pulse.failure:
        raise ExecutorFailed(pulse.failure)


def _tracing(settings: ServerSettings, engine: ServedEngine) -> "Tracing | None":
    if not settings.otlp_traces_endpoint:
        return None
    from mmengine.server.calls.tracing import over_otlp  # Imported here because OpenTelemetry is an extra.

    return over_otlp(settings.otlp_traces_endpoint, engine)


class _Pulse:
    """Sends heartbeats, and ends the server if the engine fails. Only a new process can load the model
    again.
    """

    def __init__(self, engine: ServedEngine, heartbeats: HeartbeatSender | None):
        self._engine, self._beats = engine, heartbeats
        self.app: App | None = None  # Set when the application and the server exist.
        self.server: uvicorn.Server | None = None
        self.failure = ""

    async def beat(self) -> None:
        """Watch the engine until cancelled, and send heartbeats if there is a supervisor."""
        reported, due = 0, 0.0
        while True:
            tokens = max(0, self._engine.stats().num_output_tokens - 2 * WARM_UP_TOKENS)
            now = time.monotonic()
            if now >= due or tokens != reported:
                self._tell(tokens)
                reported, due = tokens, now + BEAT_S
            await asyncio.sleep(LOOK_S)

    def _tell(self, tokens: int) -> None:
        server, readiness = self.server, self._engine.readiness()
        if self._beats is not None:
            reasons, later_s = readiness.reasons, 1
            if self.app is not None:
                reasons, later_s = self.app.admission.reasons(), self.app.admission.retry_later_s()
            is_serving = bool(server and server.started)
            self._beats.send(Beat(True, True, is_serving, reasons, later_s, tokens, readiness.is_frozen))
        if readiness.is_over and server is not None and not server.should_exit:
            self.failure = readiness.reasons[0]
            server.should_exit = True


def freeze_garbage() -> None:
    """Collect garbage once, and exempt all remaining objects from later collections."""
    gc.collect()
    _collect_rarely()


def _collect_rarely() -> None:
    """Exempt all existing objects from garbage collection, and collect new objects less often.

    With Python's default thresholds, four concurrent calls trigger a collection. Calls leave no cyclic
    garbage, so most collections find nothing.
    """
    gc.freeze()
    gc.set_threshold(*COLLECTED)


async def _tell(server: uvicorn.Server, listening: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    listening()


def _reload(*every: ApiKeys | None) -> None:
    try:
        for keys in every:
            if keys is not None:
                keys.read()
    except MMEngineError as error:  # The previous keys remain valid.
        operator_log.error("API keys not reloaded", reason=str(error))
    else:
        operator_log.info("API keys reloaded")
