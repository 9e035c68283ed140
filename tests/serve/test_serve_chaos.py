"""Tests that no resource is lost while many clients connect, disconnect, cancel and send invalid requests."""

import asyncio
import random
from collections import Counter

import pytest

from mmengine.errors import MMEngineError
from mmengine.events.log import LogReader
from mmengine.events.vocabulary import Finished, Queued
from mmengine.replay.verify import verify
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.serve.serve_fakes import builder


async def caller(engine, rng, number):
    """Send a request with random options, and check the answer if it is complete."""
    prompt = f"{number} " + "größe € " * rng.randint(0, 12)
    options = {"max_tokens": rng.choice((1, 5, 200)), "n": rng.choice((1, 1, 1, 3))}
    if rng.random() < 0.2:
        options["stop"] = rng.choice(("E €", "SS", " G", "ß"))
    if rng.random() < 0.1:
        options["deadline_s"] = rng.choice((1e-6, 1e-3))
    if rng.random() < 0.1:
        prompt += "bad"
    await asyncio.sleep(rng.random() * 0.05)
    patience = rng.choice((0, 3, 10**9, 10**9, 10**9))
    try:
        async with engine.stream(prompt, **options) as stream:
            pieces = Counter()
            async for output in stream:
                pieces[output.index] = (pieces[output.index] or "") + output.text
                patience -= 1
                if patience < 0:
                    return
    except MMEngineError:
        return
    whole = prompt.encode().upper().decode()
    for choice in stream.completion.choices:
        assert choice.text == pieces[choice.index]
        if choice.finish_reason == "stop":
            stop = options.get("stop")
            assert choice.text == (whole.split(stop)[0] if stop else whole)


def storm(seed, num_callers, folder):
    rng = random.Random(seed)
    settings = {
        "max_num_seqs": rng.choice((1, 4, 16)),
        "max_waiting": rng.choice((2, 50)),
        "num_blocks": rng.choice((30, 200)),
        "fail_at": rng.choice((None, 3, 40)),
    }

    async def main():
        engine = AsyncEngine(builder=builder(**settings), log=folder)
        callers = [caller(engine, random.Random(rng.random()), k) for k in range(num_callers)]
        await asyncio.gather(*callers)
        await engine.close(drain=rng.random() < 0.5)
        assert not engine._open and not engine._engine.built.executor.attached

    asyncio.run(asyncio.wait_for(main(), 120))
    report = verify(folder)
    assert report.ok and not report.unfinished
    events = [record.event for record in LogReader(folder)]
    queued = [event.request_id for event in events if isinstance(event, Queued)]
    ended = Counter(event.request_id for event in events if isinstance(event, Finished))
    rejected = {e.request_id for e in events if isinstance(e, Finished) and e.reason == "rejected"}
    assert set(ended) == set(queued) | rejected and set(ended.values()) <= {1}
    assert not rejected & set(queued)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_callers(seed, tmp_path):
    storm(seed, 60, tmp_path / "log")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_long_storm_of_callers(seed, tmp_path):
    storm(seed, 600, tmp_path / "log")
