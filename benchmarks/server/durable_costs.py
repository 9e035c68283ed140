"""Measure the CPU cost of durable calls. A durable call writes an envelope (the caller's data) to the log,
and a stored response also writes to the database.

Times are CPU microseconds over all threads of the serving process. Clients run in their own process. Each
round runs all variants (sides) in random order and then in reverse, so that a slowing machine affects all
sides equally.
"""

import asyncio
import gc
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

from benchmarks.server.clients import Load, load
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.serve.stream.request_stream import Stream
from mmengine.server.app.app import App
from mmengine.server.calls import call_registry as calls
from mmengine.server.chat.parsed_request import ParsedRequest
from mmengine.server.chat.submission import submit, submit_options
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle.lifecycle import freeze_garbage
from mmengine.server.lifecycle.listening_socket import listen
from mmengine.server.lifecycle.web_server import web_server
from mmengine.server.settings import ServerSettings
from mmengine.server.storage.storage import Storage

AT_ONCE, TOKENS = 16, 1
PAUSE_S = 0.001  # Time between a client's polls. Waking a client would cost server CPU time.
PLAIN, KEPT = "chat, no envelope", "chat"
PLAIN_RESPONSE, RESPONSE, STORED_RESPONSE = (
    "response, no envelope, store false",
    "response, store false",
    "response, stored",
)
_CHAT = Load(0, AT_ONCE, TOKENS, False)
_STORED = replace(_CHAT, is_response=True)
_UNSTORED = replace(_STORED, more=(("store", False),))
SIDES = {  # For each side, whether the log has an envelope, and the load.
    PLAIN: (False, _CHAT),
    KEPT: (True, _CHAT),
    PLAIN_RESPONSE: (False, _UNSTORED),
    RESPONSE: (True, _UNSTORED),
    STORED_RESPONSE: (True, _STORED),
}
ENVELOPES = {"envelope, chat": (KEPT, PLAIN), "envelope, response": (RESPONSE, PLAIN_RESPONSE)}
STORED = {"envelope and store": (STORED_RESPONSE, PLAIN_RESPONSE)}


def _submit_without(
    engine: ServedEngine, parsed_request: ParsedRequest, *, hold: bool = False, recovered: object = None
) -> list[Stream]:
    """Submit the prompts as `submit` does, but without an envelope for the log."""
    options = submit_options(parsed_request, parsed_request.request_id)
    streams = [
        engine.stream(prompt, parsed_request.sampling, hold=hold, **options)
        for prompt in parsed_request.prompts
    ]
    parsed_request.prompts.clear()
    return streams


class _Clients:
    """A client process. The process is forked before the engine exists, so that neither the fork nor
    copy-on-write is measured.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._ours.close()
            with theirs, theirs.makefile("rb") as lines:
                for line in lines:
                    load(*msgspec.json.decode(line, type=tuple[int, Load]))
                    theirs.sendall(b".")
            os._exit(0)
        theirs.close()
        self._ours.setblocking(False)

    async def ask(self, port: int, parsed_request: Load) -> None:
        """Wait until all answers are complete. Raises RuntimeError."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._ours, msgspec.json.encode((port, parsed_request)) + b"\n")
        if not await loop.sock_recv(self._ours, 1):
            raise RuntimeError("the clients received no answer")

    def close(self) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)


@contextmanager
def _clients() -> Iterator[_Clients]:
    found = _Clients()
    try:
        yield found
    finally:
        found.close()


async def _cpu_us(log: Path, clients: _Clients, rounds: int, requests: int) -> dict[str, list[float]]:
    """Return, for each side, the CPU microseconds per request in each round."""
    settings = ServerSettings(port=0)
    engine, storage = AsyncEngine(device="cpu", log=log), Storage(log, settings)
    bound = listen(settings)
    app = App(engine, settings, ApiKeys(None), ("embedded",), storage=storage)
    server = web_server(app, settings)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    freeze_garbage()
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    chance, start, port = random.Random(19), 0, bound.getsockname()[1]
    for place in range(rounds + 1):
        order = chance.sample(list(SIDES), len(SIDES))
        spent = dict.fromkeys(order, 0.0)
        for name in (*order, *reversed(order)):
            has_envelope, kind = SIDES[name]
            calls.submit = submit if has_envelope else _submit_without
            start += requests
            spent[name] += await _spent(
                app, clients, port, replace(kind, requests=requests, start=start, pause_s=PAUSE_S)
            )
        for name, seconds in spent.items() if place else ():  # The first round is a warm-up.
            found[name].append(seconds / (2 * requests) * 1e6)
    calls.submit = submit
    server.should_exit = True
    await serving
    await engine.close()
    storage.close()
    return found


async def _spent(app: App, clients: _Clients, port: int, asked: Load) -> float:
    """Return this process's CPU seconds until all answers are complete and stored."""
    gc.collect()  # The next side must not pay for the previous side's garbage.
    begun = time.process_time()
    await clients.ask(port, asked)
    await app.calls.flush()
    await asyncio.sleep(0.02)  # The log writes a request's last records after the answer.
    return time.process_time() - begun


def kept_costs(log: Path, rounds: int, requests: int) -> dict[str, list[float]]:
    with _clients() as clients:
        return uvloop.run(_cpu_us(log, clients, rounds, requests))
