"""What a call costs that is kept: CPU microseconds beside the same call in a log without envelopes and no
store, all threads of the process that serves.

Clients run in processes of their own; the sides come in turns, in an order drawn anew each round.
"""

import asyncio
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import uvloop
from serve_clients import Load, load

from mmengine.serve.async_engine import AsyncEngine
from mmengine.serve.stream import Stream
from mmengine.server import calls
from mmengine.server.app import App
from mmengine.server.asked import Asked
from mmengine.server.asking import ask, options_of
from mmengine.server.auth import ApiKeys
from mmengine.server.keep.everything import Keep
from mmengine.server.lifecycle import keep_for_good, web_server
from mmengine.server.listening import listen
from mmengine.server.settings import ServerSettings

AT_ONCE, TOKENS = 16, 1
PAUSE_S = 0.001  # of the clients: none of them sleeps on a socket, or waking it would be measured
PLAIN, KEPT = "chat, no envelope", "chat"
PLAIN_RESPONSE, RESPONSE, STORED_RESPONSE = (
    "response, no envelope, store false",
    "response, store false",
    "response, stored",
)
_CHAT = Load(0, AT_ONCE, TOKENS, False)
_STORED = replace(_CHAT, is_response=True)
_UNSTORED = replace(_STORED, more=(("store", False),))
SIDES = {  # whether the log has an envelope, and what is asked
    PLAIN: (False, _CHAT),
    KEPT: (True, _CHAT),
    PLAIN_RESPONSE: (False, _UNSTORED),
    RESPONSE: (True, _UNSTORED),
    STORED_RESPONSE: (True, _STORED),
}
ENVELOPES = {"envelope, chat": (KEPT, PLAIN), "envelope, response": (RESPONSE, PLAIN_RESPONSE)}
STORED = {"envelope and store": (STORED_RESPONSE, PLAIN_RESPONSE)}


def _ask_without(engine: AsyncEngine, asked: Asked, *, hold: bool = False) -> list[Stream]:
    """As `ask`, of one prompt, which the log knows without an envelope."""
    options = options_of(asked, asked.request_id)
    streams = [engine.stream(prompt, asked.sampling, hold=hold, **options) for prompt in asked.prompts]
    asked.prompts.clear()
    return streams


async def _cpu_us(log: Path, rounds: int, requests: int) -> dict[str, list[float]]:
    """CPU microseconds a request, by side, of each round."""
    settings = ServerSettings(port=0)
    engine, keep = AsyncEngine(device="cpu", log=log), Keep(log, settings)
    bound = listen(settings)
    app = App(engine, settings, ApiKeys(None), ("embedded",), keep=keep)
    server = web_server(app, settings)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    keep_for_good()
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    chance, start = random.Random(19), 0
    for place in range(rounds + 1):
        for name in chance.sample(list(SIDES), len(SIDES)):
            has_envelope, kind = SIDES[name]
            calls.ask = ask if has_envelope else _ask_without
            start += requests
            spent = await _spent(
                app, bound.getsockname()[1], replace(kind, requests=requests, start=start, pause_s=PAUSE_S)
            )
            if place:  # the first one warms up
                found[name].append(spent / requests * 1e6)
    calls.ask = ask
    server.should_exit = True
    await serving
    await engine.close()
    keep.close()
    return found


async def _spent(app: App, port: int, asked: Load) -> float:
    """CPU seconds of this process until all answers are there, and stored."""
    begun = time.process_time()
    child = os.fork()
    if not child:
        load(port, asked)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        await asyncio.sleep(0.01)
    await app.calls.flush()
    await asyncio.sleep(0.02)  # what the log has behind the answers
    return time.process_time() - begun


def kept_costs(log: Path, rounds: int, requests: int) -> dict[str, list[float]]:
    return uvloop.run(_cpu_us(log, rounds, requests))
