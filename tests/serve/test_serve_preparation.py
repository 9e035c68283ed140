"""Tests that prompts without media never wait for media, and that preparation has a time limit."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.errors import ConfigError, InvalidMedia, InvalidRequest, RequestFailed
from mmengine.models.media_decoding import EncodedMedia
from mmengine.processing.workers.decoders import Decoders
from mmengine.serve.async_engine import preparation
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.async_engine.cancellable_workers import CancellableWorkers
from mmengine.serve.engine.engine import Engine
from mmengine.serve.prompt.prompt import MAX_LOOKED_AT, Prompt
from mmengine_qwen3_vl.processing import load_processor
from mmengine_shapes import checkpoint_path
from tests.serve.hostile_media import image_of
from tests.serve.serve_fakes import EchoProcessor, builder
from tests.serve.test_serve_decoders import RECIPE, alive, media

IMAGE = {"type": "image", "image": b"GIF"}


class Gated(EchoProcessor):
    """A processor that prepares media only when `gate` is set."""

    def __init__(self):
        self.gate = threading.Event()
        self.num_begun = 0

    def prepare(self, messages, **options):
        content = messages[-1]["content"]
        if not isinstance(content, str):
            self.num_begun += 1
            self.decode()
        return super().prepare(messages, **options)

    def decode(self):
        self.gate.wait(20)


class Decoded(Gated):
    """A processor whose decoding process never ends."""

    decoder_recipe = RECIPE
    media_decoder = None

    def decode(self):
        self.media_decoder(media("sleep"))


def pictured(text):
    return [{"role": "user", "content": [IMAGE, {"type": "text", "text": text}]}]


@asynccontextmanager
async def engine_of(processor, **settings):
    engine = AsyncEngine(builder=builder(processor=processor, media_workers=1, **settings))
    try:
        yield engine
    finally:
        processor.gate.set()
        await engine.close(drain=False)


def run(main):
    asyncio.run(asyncio.wait_for(main(), 30))


def test_texts_never_wait_behind_images():
    async def main():
        processor = Gated()
        async with engine_of(processor) as engine:
            streams = [engine.stream(pictured(f"picture {k}"), max_tokens=20) for k in range(8)]
            answers = await asyncio.gather(*(engine.generate(f"text {k}", max_tokens=20) for k in range(20)))
            assert [answer.text for answer in answers] == [f"TEXT {k}" for k in range(20)]
            assert processor.num_begun == 1, "the other images still wait"
            processor.gate.set()
            for k, stream in enumerate(streams):
                assert "".join([output.text async for output in stream]) == f"PICTURE {k}"

    run(main)


def test_which_prompts_have_media():
    text = {"type": "text", "text": "x"}
    for content, wanted in (
        ("x", False),
        ([text, text], False),
        ([{"text": "x"}], False),
        ([text, IMAGE], True),
        ([{"image": "x.png"}], True),
        ([{"type": "text", "text": "x", "video": "x"}], True),
        ([{"type": "image_url", "image_url": {"url": "x"}}], True),
        ([text] * MAX_LOOKED_AT, False),
        ([text] * (MAX_LOOKED_AT + 1), True),
        (["x"], True),
        (None, False),
    ):
        assert Prompt.of([{"role": "user", "content": content}]).has_media is wanted, content
    assert Prompt(text="x", images=np.zeros((4, 4, 3), np.uint8)).has_media
    assert Prompt(text="x", videos=[b"x"]).has_media
    assert not Prompt(text="x").has_media and not Prompt(messages=5).has_media


@pytest.mark.parametrize("processor_class", [Gated, Decoded])
def test_the_deadline_counts_from_submit(processor_class):
    async def main():
        async with engine_of(processor_class()) as engine:
            streams = [
                engine.stream(pictured("x"), deadline_s=0.2, n=2, request_id=f"r{k}") for k in range(3)
            ]
            for k, stream in enumerate(streams):  # the first prompt is in preparation, and two wait
                ends = [(output.index, output.finish_reason) async for output in stream]
                assert ends == [(0, "abort"), (1, "abort")]
                assert stream.completion.request_id == f"r{k}"
                assert [choice.detail for choice in stream.completion.choices] == ["deadline"] * 2
            with pytest.raises(RequestFailed, match="the deadline passed before the answer was complete"):
                await engine.generate(pictured("x"), deadline_s=0.01)
            assert not engine._open and not engine._admission.preparing

    run(main)


def test_the_preparation_time_counts_for_the_deadline():
    class Slow(EchoProcessor):
        def prepare(self, messages, **options):
            time.sleep(0.2)
            return super().prepare(messages, **options)

    submitted = []

    async def main():
        async with AsyncEngine(builder=builder(processor=Slow())) as engine:
            core = engine._engine._core
            take = core.submit
            core.submit = lambda request: (submitted.append(request.deadline_ns), take(request))[1]
            await engine.generate("x", deadline_s=100.0)
            assert 0 < submitted[-1] <= 99.8e9
            await engine.generate("x")
            assert submitted[-1] == 0

    run(main)
    with Engine(builder=builder(processor=Slow())) as engine:
        engine.submit("x", deadline_s=0.1)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [output.finish_reason for output in outputs] == ["abort"]
        assert outputs[-1].completion.choices[0].detail == "deadline"


@pytest.mark.parametrize("processor_class", [Gated, Decoded])
def test_preparation_has_a_limit_of_time(processor_class):
    async def main():
        async with engine_of(processor_class(), prepare_timeout_s=1) as engine:
            streams = [engine.stream(pictured("x"), deadline_s=50) for _ in range(3)]
            for stream in streams:
                with pytest.raises(
                    RequestFailed, match=r"not prepared within 1 seconds \(prepare_timeout_s\)"
                ):
                    await anext(stream)
            assert not engine._open
            assert (await engine.generate("text", max_tokens=20)).text == "TEXT"

    run(main)


def test_a_cancelled_request_frees_its_place_and_ends_its_process():
    async def main():
        processor = Decoded()
        async with engine_of(processor, max_waiting=1, max_num_seqs=1) as engine:
            decoders = engine._engine.decoders
            decoders(media("rows 1024"))  # starts a process
            for _ in range(3):
                streams = [engine.stream(pictured("x")) for _ in range(2)]
                while not decoders._num_busy:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)
                for stream in streams:
                    await stream.aclose()
                    with pytest.raises(RequestFailed, match="given up before it began"):
                        await stream.accepted()
                assert not engine._open
            while decoders._num_busy:
                await asyncio.sleep(0.01)
            assert decoders.num_lost >= 1
            preparation = engine._admission.preparation
            assert not preparation._requests and not preparation._media._waiting

    run(main)


def test_readiness_and_metrics_show_old_preparations(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(preparation, "time", clock)

    async def main():
        processor = Gated()
        async with engine_of(processor) as engine:
            assert engine.readiness() and engine.readiness().num_preparing == 0
            streams = [engine.stream(pictured("x")) for _ in range(3)]
            while not processor.num_begun:
                await asyncio.sleep(0.01)
            clock.now += 0.375
            ready = engine.readiness()
            assert ready and ready.num_preparing == 3 and 0.3 <= ready.oldest_preparing_s < 20
            assert "mmengine_requests_preparing 3.0" in engine.metrics_text()
            age = float(engine.metrics_text().split("\nmmengine_oldest_preparation_seconds ")[1].split()[0])
            assert 0.3 <= age < 20
            monkeypatch.setattr(preparation, "STANDSTILL_S", 0.2)
            assert engine.readiness(), "a caller's slow pictures delay no text"
            # a request in preparation counts even after its client has disconnected
            for stream in streams:
                await stream.aclose()
                with pytest.raises(RequestFailed):
                    await stream.accepted()
            assert engine.readiness().num_preparing == 1
            processor.gate.set()
            while engine.readiness().num_preparing:
                await asyncio.sleep(0.01)
            assert engine.readiness()

    run(main)


def test_only_texts_that_wait_turn_readiness_off(monkeypatch):
    monkeypatch.setattr(preparation, "STANDSTILL_S", -1.0)

    class GatedTexts(Gated):
        def prepare(self, messages, **options):
            self.num_begun += 1
            self.decode()
            return EchoProcessor.prepare(self, messages, **options)

    async def main():
        processor = GatedTexts()
        async with engine_of(processor) as engine:
            workers = preparation.TEXT_WORKERS
            streams = [engine.stream("x") for _ in range(workers + 1)]
            while processor.num_begun < workers:
                await asyncio.sleep(0.01)
            (reason,) = engine.readiness().reasons
            assert reason == "a prompt without media has waited for preparation for 0 seconds"
            assert "mmengine_ready 0.0" in engine.metrics_text()
            await streams[-1].aclose()
            while engine.readiness().num_preparing > workers:
                await asyncio.sleep(0.01)
            processor.gate.set()

    run(main)


def test_closing_gives_up_preparations_and_waits_for_no_thread(monkeypatch):
    monkeypatch.setattr(preparation, "CLOSE_S", 0.01)

    async def main():
        processor = Gated()
        async with engine_of(processor) as engine:
            streams = [engine.stream(pictured("x")) for _ in range(2)]
            while not processor.num_begun:
                await asyncio.sleep(0.01)
            await engine.close(leave=True)
            assert not processor.gate.is_set() and processor.num_begun == 1, "the other was given up"
            for stream in streams:
                with pytest.raises(RequestFailed):
                    await stream.accepted()
            processor.gate.set()

    run(main)


def test_waiting_calls_can_be_removed():
    lane, gate, done = CancellableWorkers(2, "lane"), threading.Event(), []
    begun = threading.Barrier(3)
    for k in range(2):
        lane.put(k, lambda: (begun.wait(20), gate.wait(20)))
    for k in range(2, 6):
        lane.put(k, lambda k=k: done.append(k))
    begun.wait(20)
    assert not lane.drop(0), "a thread has begun with it"
    assert lane.drop(3) and not lane.drop(3) and not lane.drop("never was")
    gate.set()
    lane.close(time.monotonic() + 20)
    assert sorted(done) == [2, 4, 5]


def test_a_setting_chooses_processes_or_threads():
    def decoders(kind, **settings):
        processor = Decoded()
        engine = kind(builder=builder(processor=processor, **settings))
        inner = engine if kind is Engine else engine._engine
        assert processor.media_decoder is inner.decoders
        (asyncio.run(engine.close()) if kind is AsyncEngine else engine.close())
        return inner.decoders

    async def of_async(**settings):
        processor = Decoded()
        async with AsyncEngine(builder=builder(processor=processor, **settings)) as engine:
            return engine._engine.decoders

    assert decoders(Engine) is None and decoders(Engine, media_decoding="threads") is None
    assert isinstance(decoders(Engine, media_decoding="processes"), Decoders)
    assert isinstance(asyncio.run(of_async()), Decoders)
    assert asyncio.run(of_async(media_decoding="threads")) is None
    with pytest.raises(ConfigError, match="media_decoding"):
        builder(media_decoding="x")(stop_watcher_factory=lambda _: None).config.check()


def test_processes_give_the_pixels_that_threads_give():
    """Threads and processes decode media to equal pixels. Errors in a process reach the caller."""
    png, gif = image_of("PNG"), image_of("GIF")
    contents = [
        [{"type": "image", "image": png}, {"type": "image", "image": gif, "max_pixels": 1000}],
        [{"type": "video", "video": [png, png, png], "fps": 2}],
    ]
    processor = load_processor(checkpoint_path())
    processor.media_cache.max_bytes = 0
    decoders = Decoders(processor.decoder_recipe, 1, 2**31, 30)
    for content in contents:
        messages = [{"role": "user", "content": content}]
        threads = processor.prepare(messages)
        processor.media_decoder = decoders
        processes = processor.prepare(messages)
        processor.media_decoder = None
        for one, other in zip(threads.media, processes.media, strict=True):
            assert one.item == other.item and np.array_equal(one.patches, other.patches)
    processor.media_decoder = decoders
    with pytest.raises(InvalidMedia, match=r"image 0 \(message 0, part 0\) is not a supported image"):
        processor.prepare([{"role": "user", "content": [{"type": "image", "image": b"no image"}]}])
    pid = decoders._idle[0].pid
    assert alive(pid)
    decoders.close()
    assert not alive(pid)


def test_a_process_refuses_what_is_too_long_before_it_is_resized():
    processor = load_processor(checkpoint_path())
    processor.max_prompt_tokens = 20
    decoders = Decoders(processor.decoder_recipe, 1, 2**31, 30)
    part = {"resized_height": 512, "resized_width": 512}
    with pytest.raises(InvalidRequest, match="20 maximum of this engine"):
        decoders(EncodedMedia("image", image_of("PNG"), part, "image 0"))
    decoders.close()
