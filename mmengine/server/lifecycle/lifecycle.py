"""From a model to a server that listens, and back."""

import asyncio
import base64
import gc
import io
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from PIL import Image

from mmengine.errors import ExecutorFailed, InvalidMedia, InvalidRequest, MMEngineError
from mmengine.processing.fetch.door import MediaDoor
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.operator_log import operator_log
from mmengine.server.app.app import App
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle.heartbeat import BEAT_S, Beat, Beats
from mmengine.server.lifecycle.tls import tls_options
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Keep
from mmengine.server.transport.open_files import raise_limit
from mmengine.server.transport.protocol import http_protocol

if TYPE_CHECKING:  # OpenTelemetry is an extra
    from mmengine.server.calls.tracing import Tracing

SWITCH_S = 0.0005  # that a thread keeps the interpreter while the event loop waits; Python's own is 5 ms
LAST_WORDS_S = 1.0  # to tell the callers that are left, when the server ends
LOOK_S = 0.05  # between looks at what a supervisor is to hear
WARM_UP_TOKENS = 2  # a prefill, and a step that decodes
WARM_UP_PIXELS = 64  # a side
COLLECTED = (5000, 2, 10)  # of the garbage collector: it looks at 5000 objects in half a millisecond


class _Uvicorn(uvicorn.Server):
    """A first signal lets streams finish, a second one ends at once. What does not finish stays in the log,
    and its callers are told so."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None  # when it listens, as the sockets
        self._sockets: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop, self._sockets = asyncio.get_running_loop(), sockets or []
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = self._app.admission.is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._take_no_more)

    def _take_no_more(self) -> None:
        """Who connects from now on waits for another process, where one has the socket too; who has connected
        is answered until `shutdown`, a tenth of a second later."""
        for server in self.servers:
            server.close()
        for each in self._sockets:
            each.close()
        self._app.close_pages()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.admission.is_draining = True
        await super().shutdown(sockets)
        waiting = set(self.server_state.tasks)
        if self.force_exit:  # else they were told when drain_s was over
            for task in waiting:
                task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_WORDS_S)


def run(serving: Coroutine[None, None, None]) -> None:
    """`serve` on a loop of uvloop."""
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
    door: MediaDoor | None = None,
    open_keep: Callable[[], Keep] | None = None,
    beats: Beats | None = None,
    in_haste: bool = False,
    live: Path | None = None,
    admin_keys: ApiKeys | None = None,
) -> None:
    """Answer until a signal ends it; the engine is closed then. `listening`: called when a step has run and
    the socket is served. `door`: to media that messages name. `open_keep`: to what is kept beside the log.
    `beats`: to a supervisor, which hears how things stand; then an engine that stops raises ExecutorFailed,
    for another process to take its place. `in_haste`: clients of the process before wait, and are answered
    while the first steps run. `live`: the folder of a log that /live shows. `admin_keys`: who may load
    adapters; read again at SIGHUP too."""
    pulse = _Pulse(engine, beats)
    tasks, keep = [asyncio.create_task(pulse.beat())], None
    tracing = _tracing(settings, engine)
    try:
        keep = open_keep() if open_keep is not None else None
        if in_haste:
            tasks.append(asyncio.create_task(_warm_up_meanwhile(engine, settings.chat_template)))
            _look_seldom()  # of what is garbage by now there are some thousand objects
        else:
            await _warm_up(engine, settings.chat_template)
            keep_for_good()
        app = App(engine, settings, keys, names, door, keep, tracing, live, admin_keys)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the app says what there is to say
        server = web_server(app, settings)
        pulse.app, pulse.server = app, server
        with suppress(NotImplementedError, ValueError):  # not on the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, keys, admin_keys)
        running = asyncio.create_task(app.run())
        tasks.append(asyncio.create_task(_tell(server, listening)))
        try:
            await server.serve(sockets=[bound])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)  # what batches wrote is on the disk then
    finally:
        await engine.close(leave=True)
        if keep is not None:
            keep.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        for task in tasks:
            task.cancel()
    if pulse.failure:
        raise ExecutorFailed(pulse.failure)


def _tracing(settings: ServerSettings, engine: ServedEngine) -> "Tracing | None":
    if not settings.otlp_traces_endpoint:
        return None
    from mmengine.server.calls.tracing import over_otlp  # lazy: OpenTelemetry is an extra

    return over_otlp(settings.otlp_traces_endpoint, engine)


class _Pulse:
    """Tells a supervisor how things stand, and ends a server whose engine stopped: another process can load
    the model again, which this one cannot."""

    def __init__(self, engine: ServedEngine, beats: Beats | None):
        self._engine, self._beats = engine, beats
        self.app: App | None = None  # when it was made, as the server
        self.server: uvicorn.Server | None = None
        self.failure = ""

    async def beat(self) -> None:
        """Until it is cancelled."""
        told, due = 0, 0.0
        while self._beats is not None:
            tokens = max(0, self._engine.stats().num_output_tokens - 2 * WARM_UP_TOKENS)
            now = time.monotonic()
            if now >= due or tokens != told:
                self._tell(self._beats, tokens)
                told, due = tokens, now + BEAT_S
            await asyncio.sleep(LOOK_S)

    def _tell(self, beats: Beats, tokens: int) -> None:
        server, readiness = self.server, self._engine.readiness()
        reasons, later_s = readiness.reasons, 1
        if self.app is not None:
            reasons, later_s = self.app.admission.reasons(), self.app.admission.retry_later_s()
        beats.tell(Beat(True, True, server is not None and server.started, reasons, later_s, tokens))
        if readiness.is_over and server is not None and not server.should_exit:
            self.failure = readiness.reasons[0]
            server.should_exit = True


def keep_for_good() -> None:
    """What is in memory by now stays there: the garbage collector does not look at it again."""
    gc.collect()
    _look_seldom()


def _look_seldom() -> None:
    """Keep what is in memory from the garbage collector, and have it look at what is new less often: by
    Python's own thresholds a wave of four calls brings it, which leave no garbage."""
    gc.freeze()
    gc.set_threshold(*COLLECTED)


def web_server(app: App, settings: ServerSettings) -> uvicorn.Server:
    """Which serves a socket with the application, until it is told to end."""
    config = uvicorn.Config(
        app,
        http=http_protocol(settings),
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=settings.max_connections,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.drain_s,
        **tls_options(settings),
    )
    return _Uvicorn(config, app)


async def _tell(server: uvicorn.Server, listening: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    listening()


async def _warm_up(engine: ServedEngine, chat_template: str) -> None:
    """Steps have run, of a text and of a chat with a form, and an image where the model takes some, before
    anybody is told to come: kernels are compiled, and the processes and tables that the first of each makes
    are there. A model may know of no messages."""
    await engine.generate(Prompt(text="Hello"), max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    content: list[dict[str, object]] = [{"type": "text", "text": "Hello"}]
    if engine.processor.max_image_pixels:
        content.insert(0, {"type": "image_url", "image_url": {"url": _picture()}})
    template = {"chat_template": chat_template} if chat_template else None
    options = {"local_files": False}
    prompt = Prompt([{"role": "user", "content": content}], media_options=options, template_options=template)
    form: dict[str, object] = {"type": "json_object"}
    try:
        await engine.generate(prompt, max_tokens=WARM_UP_TOKENS, response_format=form)
    except (InvalidRequest, InvalidMedia) as error:
        operator_log.warning("no first step of a chat with a form", reason=str(error))


async def _warm_up_meanwhile(engine: ServedEngine, chat_template: str) -> None:
    # The queue is full, or the server ends: callers hear of it, where it matters.
    with suppress(MMEngineError):
        await _warm_up(engine, chat_template)


def _picture() -> str:
    """A `data:` URL."""
    file = io.BytesIO()
    Image.new("RGB", (WARM_UP_PIXELS, WARM_UP_PIXELS), "grey").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _reload(*every: ApiKeys | None) -> None:
    try:
        for keys in every:
            if keys is not None:
                keys.read()
    except MMEngineError as error:  # those of before hold
        operator_log.error("API keys not reloaded", reason=str(error))
    else:
        operator_log.info("API keys reloaded")
