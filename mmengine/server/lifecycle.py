"""From a model to a server that listens, and back."""

import asyncio
import base64
import gc
import io
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType

import uvicorn
import uvloop
from PIL import Image

from mmengine.errors import ConfigError, InvalidMedia, InvalidRequest, MMEngineError
from mmengine.processing.fetch.door import MediaDoor
from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.operators import operator_log
from mmengine.serve.prompts import Prompt
from mmengine.server.app import App
from mmengine.server.auth import ApiKeys
from mmengine.server.keep.everything import Keep
from mmengine.server.protocol import http_protocol
from mmengine.server.settings import ServerSettings
from mmengine.server.tls import tls_options

SWITCH_S = 0.0005  # that a thread keeps the interpreter while the event loop waits; Python's own is 5 ms
LAST_WORDS_S = 1.0  # to tell the callers that are left, when the server ends
WARM_UP_TOKENS = 2  # a prefill, and a step that decodes
WARM_UP_PIXELS = 64  # a side


class _Uvicorn(uvicorn.Server):
    """A first signal lets streams finish, a second one ends at once. What does not finish stays in the log,
    and its callers are told so."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = self._app.admission.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        waiting = set(self.server_state.tasks)
        if self.force_exit:  # else they were told when drain_s was over
            for task in waiting:
                task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_WORDS_S)


def listen(settings: ServerSettings) -> socket.socket:
    """The bound socket. Raises ConfigError where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        bound = socket.create_server(
            (settings.host, settings.port), family=family, backlog=settings.max_connections
        )
    except OSError as error:
        address = f"{settings.host}:{settings.port}"
        raise ConfigError(
            f"cannot listen on {address} ({_why(error)}); choose another --host or --port"
        ) from None
    bound.setblocking(False)
    return bound


def _why(error: OSError) -> str:
    """Of an error with a socket: the system's own words, which Python puts the address behind."""
    if isinstance(error, socket.gaierror) or error.errno is None:
        return (error.strerror or str(error)).partition(" (while")[0]
    return os.strerror(error.errno)


def run(serving: Coroutine[None, None, None]) -> None:
    """`serve` on a loop of uvloop."""
    sys.setswitchinterval(SWITCH_S)
    uvloop.run(serving)


async def serve(
    engine: AsyncEngine,
    settings: ServerSettings,
    keys: ApiKeys,
    names: tuple[str, ...],
    bound: socket.socket,
    listening: Callable[[], None],
    door: MediaDoor | None = None,
    open_keep: Callable[[], Keep] | None = None,
) -> None:
    """Answer until a signal ends it; the engine is closed then. `listening`: called when a step has run and
    the socket is served. `door`: to media that messages name. `open_keep`: to what is kept beside the
    log."""
    keep = None
    try:
        keep = open_keep() if open_keep is not None else None
        await _warm_up(engine, settings.chat_template)
        app = App(engine, settings, keys, names, door, keep)
        keep_for_good()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the app says what there is to say
        server = web_server(app, settings)
        with suppress(NotImplementedError, ValueError):  # not on the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, keys)
        running = asyncio.create_task(app.run())
        telling = asyncio.create_task(_tell(server, listening))
        try:
            await server.serve(sockets=[bound])
        finally:
            running.cancel()
            telling.cancel()
            await asyncio.gather(running, return_exceptions=True)  # what batches wrote is on the disk then
    finally:
        await engine.close(leave=True)
        if keep is not None:
            keep.close()


def keep_for_good() -> None:
    """What is in memory by now stays there: the garbage collector does not look at it again."""
    gc.collect()
    gc.freeze()


def web_server(app: App, settings: ServerSettings) -> uvicorn.Server:
    """Which serves a socket with the application, until it is told to end."""
    config = uvicorn.Config(
        app,
        http=http_protocol(settings.max_header_bytes),
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


async def _warm_up(engine: AsyncEngine, chat_template: str) -> None:
    """Steps have run, of a text and of an image with a form, before anybody is told to come: kernels are
    compiled, and the processes and tables that the first of each makes are there. A model may know of no
    messages, or of no images."""
    await engine.generate(Prompt(text="Hello"), max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    content = [{"type": "image_url", "image_url": {"url": _picture()}}, {"type": "text", "text": "Hello"}]
    template = {"chat_template": chat_template} if chat_template else None
    options = {"local_files": False}
    prompt = Prompt([{"role": "user", "content": content}], media_options=options, template_options=template)
    form: dict[str, object] = {"type": "json_object"}
    try:
        await engine.generate(prompt, max_tokens=WARM_UP_TOKENS, response_format=form)
    except (InvalidRequest, InvalidMedia) as error:
        operator_log.warning("no first step with an image and a form", reason=str(error))


def _picture() -> str:
    """A `data:` URL."""
    file = io.BytesIO()
    Image.new("RGB", (WARM_UP_PIXELS, WARM_UP_PIXELS), "grey").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _reload(keys: ApiKeys) -> None:
    try:
        keys.read()
    except MMEngineError as error:  # those of before hold
        operator_log.error("API keys not reloaded", reason=str(error))
    else:
        operator_log.info("API keys reloaded")
