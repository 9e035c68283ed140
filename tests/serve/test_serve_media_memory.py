"""Prompts are prepared ahead within a byte limit, and cancelled prompts are not prepared."""

import asyncio
import hashlib
import threading
import time

import numpy as np
import pytest

from mmengine.errors import InvalidMedia, RequestFailed
from mmengine.models.plugin import MediaInput, Prepared
from mmengine.request import MediaItem
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.batch.run_batch import run_batch
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.media_memory import MediaMemory, media_workers
from mmengine.serve.prompt.options import make_options
from mmengine.serve.prompt.prompt import Prompt
from tests.serve.serve_fakes import EchoProcessor, builder

ROWS = 1000  # bytes of each prompt's pixels


class Picturing(EchoProcessor):
    """A processor whose prompts have pixels. Workers wait until `gate` is set."""

    def __init__(self, slow=0.0):
        self.gate, self.slow = threading.Event(), slow
        self.gate.set()
        self.prepared, self.salts = [], []

    def prepare(self, messages, *, cache_salt="", **options):
        self.gate.wait(10)
        time.sleep(self.slow)
        self.prepared.append(messages[-1]["content"])
        self.salts.append(cache_salt)
        text = super().prepare(messages, **options)
        name = hashlib.sha256(text.text.encode()).digest()
        pixels = MediaInput(MediaItem(name, "image", ((0, 1),), (1, 2, 2)), np.zeros((1, ROWS), np.uint8))
        return Prepared(text.prompt_token_ids, (pixels,), text.text)


class Watched(MediaMemory):
    most = 0

    def hold(self, holder, media):
        super().hold(holder, media)
        self.most = max(self.most, self.num_bytes)


def media_of(*arrays):
    return [MediaInput(None, array) for array in arrays]


def test_rows_that_several_hold_count_once():
    # Two requests share an array of 100 bytes, which counts once.
    memory, shared, own = MediaMemory(250), np.zeros(100, np.uint8), np.zeros(200, np.uint8)
    memory.hold("a", media_of(shared))
    memory.hold("b", media_of(shared, own))
    assert memory.num_bytes == 300 and not memory.has_room
    memory.release("b"), memory.release("b"), memory.release("never was")
    assert memory.num_bytes == 100 and memory.has_room
    memory.release("a")
    assert memory.num_bytes == 0 and not memory._rows and not memory._held
    memory.hold("c", media_of(np.zeros(300, np.uint8)))
    waited = []
    waiter = threading.Thread(target=lambda: waited.append(memory.wait_for_room(lambda: False)))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    memory.release("c")
    waiter.join(5)
    assert waited == [None]


def pictured(text):
    """Return a question about a picture."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def test_how_many_workers():
    assert media_workers(7) == 7
    assert 1 <= media_workers(0) <= 4


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr("mmengine.serve.engine.engine.MediaMemory", Watched)


def batch_engine(processor, **config):
    return Engine(builder=builder(processor=processor, media_workers=2, **config))


@pytest.mark.parametrize("ahead", [1, 3 * ROWS, 10**9])
def test_a_batch_prepares_ahead_within_its_bytes(ahead):
    processor = Picturing()
    with batch_engine(processor, media_ahead_bytes=ahead) as engine:
        options = make_options(None, {"max_tokens": 30, "cache_salt": "tenant"})
        jobs = [(Prompt.of(f"prompt {k}" if k != 5 else "bad"), options) for k in range(40)]
        answers = dict(run_batch(engine, jobs))
        assert isinstance(answers.pop(5), InvalidMedia)
        assert {k: one.text for k, one in answers.items()} == {k: f"PROMPT {k}" for k in range(40) if k != 5}
        assert engine.media_memory.num_bytes == 0
        # Both workers begin a prompt if the limit is not reached yet, so two prompts may exceed the limit. If
        # no request runs, a prompt above the limit is prepared.
        assert engine.media_memory.most <= max(ahead, ROWS) + 2 * ROWS or ahead == 10**9
        assert processor.salts == ["tenant"] * 39 + processor.salts[39:]


def test_an_abandoned_batch_releases_prepared_media():
    processor, others = Picturing(slow=0.002), threading.active_count()
    with batch_engine(processor) as engine:
        options = make_options(None, {"max_tokens": 30})
        answers = run_batch(engine, ((Prompt.of(f"prompt {k}"), options) for k in range(10**6)))
        next(answers)
        answers.close()
        assert engine.media_memory.num_bytes == 0
        assert len(processor.prepared) < 60
        assert threading.active_count() < others + 20


def test_a_closed_stream_drops_its_waiting_preparation():
    async def main():
        processor = Picturing()
        engine = AsyncEngine(builder=builder(processor=processor, media_workers=1))
        processor.gate.clear()
        streams = [engine.stream(pictured(f"prompt {k}"), max_tokens=20) for k in range(6)]
        for stream in streams[1:5]:
            await stream.aclose()
        processor.gate.set()
        texts = ["".join([output.text async for output in stream]) for stream in (streams[0], streams[5])]
        assert texts == ["PROMPT 0", "PROMPT 5"]
        with pytest.raises(RequestFailed, match="before it began"):
            await streams[2].accepted()
        await engine.close()
        assert [content[1]["text"] for content in processor.prepared] == ["prompt 0", "prompt 5"]
        assert engine._engine.media_memory.num_bytes == 0

    asyncio.run(asyncio.wait_for(main(), 30))


def test_streams_wait_for_room_and_each_hears_of_its_own_error():
    async def main():
        build = builder(processor=Picturing(), media_workers=2, media_ahead_bytes=2 * ROWS)
        async with AsyncEngine(builder=build) as engine:
            memory = engine._engine.media_memory

            async def one(k):
                if k % 7 == 3:
                    with pytest.raises(InvalidMedia):
                        await engine.generate(pictured(f"bad {k}"), max_tokens=20)
                    return
                answer = await engine.generate(pictured(f"prompt {k}"), max_tokens=20)
                assert answer.text == f"PROMPT {k}"

            await asyncio.gather(*(one(k) for k in range(30)))
            assert memory.num_bytes == 0 and memory.most <= 4 * ROWS

    asyncio.run(asyncio.wait_for(main(), 30))
