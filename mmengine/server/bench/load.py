"""Generates a load on a server: calls with random prompts, at a given mean rate, or as many at once as
the concurrency limit allows.
"""

import asyncio
import base64
import itertools
import json
import math
import mimetypes
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmengine.errors import ConfigError
from mmengine.server.bench.streamed_call import Call, Target, send_call

MAX_REQUESTS = 100_000  # Maximum number of calls in a load.
MAX_CONCURRENCY = 4096  # Maximum number of concurrent calls.
MAX_PROMPT_WORDS = 100_000  # Maximum number of words in a prompt.
_WORDS = ("red", "green", "blue", "large", "small", "circle", "square", "triangle", "left", "right")


@dataclass(frozen=True, slots=True)
class Load:
    """The calls to generate.

    `rate`: mean number of calls per second, with exponentially distributed intervals between calls. At most
    `concurrency` calls run at once. If `rate` is infinite, a new call starts whenever fewer calls are
    running. `prompt_words` and `max_tokens` apply to each call. With `ignore_eos`, each answer has exactly
    `max_tokens` tokens.
    """

    num_requests: int
    rate: float
    concurrency: int
    prompt_words: int
    max_tokens: int
    model: str = ""
    images: tuple[Path, ...] = ()
    seed: int = 0
    timeout_s: float = 600.0
    ignore_eos: bool = True

    def check(self) -> None:
        """Raise ConfigError for a value beyond its limit."""
        for name, most in (
            ("num_requests", MAX_REQUESTS),
            ("concurrency", MAX_CONCURRENCY),
            ("prompt_words", MAX_PROMPT_WORDS),
        ):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most:,}, not {getattr(self, name):,}")


def bodies(load: Load) -> list[bytes]:
    """Return all calls' bodies. Each prompt begins with a random word, which prevents prefix cache hits."""
    chance = random.Random(load.seed)
    urls = [_data_url(path) for path in load.images]
    images = itertools.cycle(urls) if urls else None
    return [
        _body(load, number, chance, next(images) if images else "") for number in range(load.num_requests)
    ]


def _body(load: Load, number: int, chance: random.Random, image: str) -> bytes:
    text = " ".join(
        [f"{chance.getrandbits(32):08x}", *chance.choices(_WORDS, k=max(load.prompt_words - 1, 0))]
    )
    content: list[dict[str, object]] = [{"type": "text", "text": text}]
    if image:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": content if image else text}],
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"model": load.model} if load.model else {}),
        **({"ignore_eos": True} if load.ignore_eos else {}),
    }
    return json.dumps(body).encode()


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


async def run(
    target: Target, load: Load, done: Callable[[], None] = lambda: None
) -> tuple[list[Call], float]:
    """Send all calls in the load. Return the results in the order in which the calls started, and the total
    time in seconds. `done` is called after each call.
    """
    chance, places = random.Random(load.seed + 1), asyncio.Semaphore(load.concurrency)

    async def one(body: bytes) -> Call:
        try:
            call = await send_call(target, body, load.timeout_s)
        finally:
            places.release()
        done()
        return call

    begun = due = time.monotonic()
    tasks = []
    for body in bodies(load):
        await places.acquire()
        if math.isfinite(load.rate):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += chance.expovariate(load.rate)
        tasks.append(asyncio.create_task(one(body)))
    calls = await asyncio.gather(*tasks)
    return calls, time.monotonic() - begun
