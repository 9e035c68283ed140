"""Runs a server on a thread, with a real socket, and checks its answers."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.server.app.app import App
from mmengine.server.http.auth import ADMIN_ENVIRONMENT, ApiKeys
from mmengine.server.lifecycle.listening_socket import listen
from mmengine.server.lifecycle.web_server import web_server
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage
from tests.serve.serve_fakes import EchoExecutor, builder
from tests.server.openai_answers import CHAT, COMPLETIONS, check_answer, check_stream, events_of
from tests.server.own_answers import check_own
from tests.server.responses_answers import RESPONSES, check_events, check_response

NAMES = ("echo", "also-echo")
PATIENCE_S = 60  # Seconds that a client waits.


class SlowEcho(EchoExecutor):
    """An executor that echoes the prompt in upper case, and sleeps in each step."""

    pause_s = 0.002

    def collect(self):
        time.sleep(self.pause_s)
        return super().collect()


class Lasting(SlowEcho):
    """An executor whose answers to long prompts last until `may_end` is set."""

    def __init__(self, *given):
        super().__init__(*given)
        self.may_end = threading.Event()

    def answer_to(self, prompt):
        said = super().answer_to(prompt)
        return said if len(prompt) < 50 or self.may_end.is_set() else said * 1000


# With this context, a Lasting answer takes over a minute.
LONG_CONTEXT = {"num_blocks": 2000, "max_model_len": 30_000}


class Served:
    def __init__(
        self,
        engine,
        settings,
        names,
        key_file,
        media_fetcher=None,
        storage=None,
        tracing=None,
        live=None,
        admin_key_file=None,
    ):
        self.media_fetcher, self.tracing, self.live = media_fetcher, tracing, live
        self.engine, self.settings, self.names = engine, settings, names
        self.keys, self.admin_keys = ApiKeys(key_file), ApiKeys(admin_key_file, ADMIN_ENVIRONMENT)
        several = self.keys.are_several
        self.storage = (
            Storage(settings=settings, has_several_keys=several, **storage) if storage is not None else None
        )
        self._bound = listen(settings)
        self.port = self._bound.getsockname()[1]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(10)

    def _run(self):
        asyncio.run(self._serve())

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        if callable(self.engine):  # An engine that is created on its event loop.
            self.engine = self.engine()
        tracing = self.tracing(self.engine) if self.tracing is not None else None
        given = (self.engine, self.settings, self.keys, self.names, self.media_fetcher, self.storage)
        self.app = App(*given, tracing, self.live, self.admin_keys)
        self.server = web_server(self.app, self.settings)
        serving = asyncio.create_task(self.server.serve(sockets=[self._bound]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        running = asyncio.create_task(self.app.run())
        self._ready.set()
        await serving
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.engine.close(leave=True)
        if self.storage is not None:
            self.storage.close()

    @property
    def executor(self):
        return self.engine._engine.built.executor

    def stop(self):
        """Stop the server as SIGTERM does."""
        self.server.handle_exit(15, None)

    def close(self):
        if self._thread.is_alive():
            self.stop()
            self.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def call(self, path, body=None, headers=None, method=None):
        """Call the server. Return the status, the headers with lower-case names, and the body, decoded if it
        is JSON.

        Each answer is checked against our OpenAPI document. Answers from chat, completions and responses are
        also checked against OpenAI's description.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        method = method or ("GET" if body is None else "POST")
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type") == "application/json"
        answer = json.loads(text) if is_json else text.decode()
        check_own(path, method, response.status, found, answer)
        if path in (CHAT, COMPLETIONS) and is_json:
            check_answer(path, response.status, answer)
        elif path in (CHAT, COMPLETIONS):
            check_stream(path, answer, json.loads(data))
        elif path == RESPONSES and is_json:
            check_response(response.status, answer)
        elif path == RESPONSES:
            check_events(answer)
        return response.status, found, answer

    def chat(self, content="hello", **fields):
        return self.call(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields}
        )

    def respond(self, given="hello", **fields):
        return self.call(RESPONSES, {"input": given, **fields})

    def events(self, content="hello", **fields):
        """Send a streamed chat call, and return the data of its events, including [DONE]."""
        status, headers, text = self.chat(content, stream=True, **fields)
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        return events_of(text)


@contextmanager
def served(
    engine=None,
    *,
    names=NAMES,
    key_file=None,
    executor_class=EchoExecutor,
    engine_options=None,
    config=None,
    media_fetcher=None,
    storage=None,
    tracing=None,
    live=None,
    admin_key_file=None,
    **settings,
):
    """Run a server. `storage`: keyword arguments of Storage. `tracing`: a function that returns the Tracing
    for an engine. `live`: the log folder that /live shows.
    """
    if engine is None:
        build = builder(executor_class=executor_class, **(config or {}))
        engine = AsyncEngine(builder=build, **(engine_options or {}))
    made = ServerSettings.of({"port": 0, **settings})
    one = Served(engine, made, names, key_file, media_fetcher, storage, tracing, live, admin_key_file)
    try:
        yield one
    finally:
        one.close()


def wait_for(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


def events_past_the_deadline(server):
    """Return an answer's events. A fake clock makes the answer's deadline pass after the first token."""
    deadlines = server.engine._engine._core.inbox._deadlines
    begun, told = server.engine.stats().num_output_tokens, deadlines._clock

    def clock():
        has_begun = server.engine.stats().num_output_tokens > begun
        return told() + has_begun * 1_000_000_000_000

    deadlines._clock = clock
    try:
        return server.events("a" * 190, deadline_s=100)
    finally:
        deadlines._clock = told


def opened(server, **fields):
    """Send a streamed chat call with a prompt of 300 characters, and return its socket."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "a" * 300}], "stream": True, **fields}
    ).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def is_empty(server):
    engine = server.engine
    return (
        not engine._open
        and not engine._open.running
        and not server.app.admission.bodies.num_bytes
        and not server.app.admission.shares.num_open
        and not engine.stats().num_running
    )


def leave_at_random(server, times, chosen):
    """Send `times` calls, and disconnect each after a random time. `chosen`: the random generator."""
    for _ in range(times):
        connection = opened(server, n=chosen.choice([1, 1, 3]), stream=chosen.random() < 0.8)
        time.sleep(chosen.random() * 0.03)
        connection.close()
