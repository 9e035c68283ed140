"""Measure the cost of the HTTP layer per request and per frame (a streamed event), with a scripted engine.
CPU seconds are measured in the serving process; clients run in another process.
"""

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass

import uvloop

from benchmarks.server.clients import Load, load
from mmengine.config import EngineConfig
from mmengine.models.loader import resolve_folder
from mmengine.models.registry import plugin_for
from mmengine.request import SamplingParams
from mmengine.serve.prompt.options import SubmitOptions, make_options
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.requests.health import Readiness
from mmengine.serve.requests.recovery import RecoveredRequest
from mmengine.serve.stream.channel import Channel, put_all
from mmengine.serve.stream.request_stream import Stream
from mmengine.serve.text.output_text import OutputText
from mmengine.serve.text.request_output import Choice, Completion, RequestOutput
from mmengine.server.app.app import App
from mmengine.server.http.auth import ApiKeys
from mmengine.server.lifecycle.lifecycle import freeze_garbage
from mmengine.server.lifecycle.listening_socket import listen
from mmengine.server.lifecycle.web_server import web_server
from mmengine.server.settings import ServerSettings

LINES = "The red triangle is small, the star to its left is large — and blue; nothing is “behind” them. "
STEP_S = 0.003  # Step time of the scripted engine with several streams. Clients can keep up with these steps.
# Clients poll at this interval. Waking up clients that wait for a socket would cost the server CPU time.
PAUSE_S = 0.001
SHORT = 8  # Tokens of a short answer. The cost of short answers is subtracted from the cost of long answers.


@dataclass(slots=True)
class _Speaking:
    channel: Channel
    prepared_tokens: object
    num_tokens: int
    said: int = 0


class ScriptedEngine:
    """Replaces AsyncEngine, with the same prompt preparation. Each step generates a token for each request.
    As in the engine, a step passes all tokens to the channels in a single call.
    """

    has_log = False
    can_end_reasoning = False

    def __init__(self) -> None:
        folder = resolve_folder(None)
        self.processor = plugin_for(folder).load_processor(folder)
        self.config = EngineConfig(max_model_len=4096)
        self.max_open = 4096
        self._tokens = self.processor.tokenizer.encode(LINES * 8)
        self._speaking: deque[_Speaking] = deque()

    def readiness(self) -> Readiness:
        return Readiness()

    def metrics_text(self) -> str:
        return ""

    def left(self) -> list[RecoveredRequest]:
        return []

    def stream(
        self, prompt: Prompt, sampling: SamplingParams, *, hold: bool = False, **options: SubmitOptions
    ) -> Stream:
        asked = make_options(sampling, options)
        prepared = Prompt.of(prompt).prepare(self.processor, asked.cache_salt)
        channel = Channel(asked, OutputText(self.processor.tokenizer, sampling))
        channel.accepted.set()
        if not self._speaking:
            asyncio.get_running_loop().call_soon(self._step)
        self._speaking.append(_Speaking(channel, prepared.prompt_token_ids, sampling.max_tokens))
        return Stream(channel, lambda channel: None, lambda channels: None)

    def _step(self) -> None:
        news = []
        for _ in range(len(self._speaking)):
            one = self._speaking.popleft()
            token = self._tokens[one.said % len(self._tokens)]
            one.said += 1
            if one.said < one.num_tokens:
                news.append((one.channel, RequestOutput("r", 0, "", [token])))
                self._speaking.append(one)
                continue
            done = Completion("r", one.prepared_tokens, [Choice(0, "", [], "length")])
            news.append((one.channel, RequestOutput("r", 0, "", [token], "length", done)))
        put_all(news)
        if self._speaking:
            pause_s = STEP_S if len(self._speaking) > 1 else 0.0
            asyncio.get_running_loop().call_later(pause_s, self._step)


async def _cpu_s(loads: list[Load]) -> list[float]:
    """Return this process's CPU seconds for each load."""
    settings = ServerSettings(port=0)
    bound = listen(settings)
    server = web_server(App(ScriptedEngine(), settings, ApiKeys(None), ("scripted",)), settings)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    freeze_garbage()
    found = []
    for one in loads:
        begun = time.process_time()
        child = os.fork()
        if not child:
            load(bound.getsockname()[1], one)
            os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            await asyncio.sleep(0.01)
        found.append(time.process_time() - begun)
    server.should_exit = True
    await serving
    return found


def front_costs(quick: bool) -> dict[str, float]:
    """Return CPU microseconds by name. "request": a request with a one-token answer, without streaming.
    "frame": each further token of a stream, with 64 concurrent streams. "frame of one stream": each further
    token, with a single stream.
    """
    scale = 1 if quick else 4
    requests, frames = 200 * scale, 100 * scale
    warm = Load(50, 1, SHORT, True)
    whole = Load(requests, 8, 1, False, pause_s=PAUSE_S)
    short, long = (
        Load(128, 64, SHORT, True, pause_s=PAUSE_S),
        Load(128, 64, SHORT + frames, True, pause_s=PAUSE_S),
    )
    alone, alone_long = (
        Load(16, 1, SHORT, True, pause_s=PAUSE_S),
        Load(16, 1, SHORT + frames, True, pause_s=PAUSE_S),
    )
    _, one, few, many, lone, lone_many = uvloop.run(_cpu_s([warm, whole, short, long, alone, alone_long]))
    return {
        "request": one / requests * 1e6,
        "frame": (many - few) / (frames * 128) * 1e6,
        "frame of one stream": (lone_many - lone) / (frames * 16) * 1e6,
    }


if __name__ == "__main__":
    print(front_costs(quick=True))
