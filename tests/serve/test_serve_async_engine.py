# Tests AsyncEngine: streams, cancellation, limits, failures and closing. The executor echoes prompts.

import asyncio
import gc
import threading
from contextlib import suppress

import pytest

from mmengine.errors import (
    ExecutorFailed,
    InvalidMedia,
    InvalidRequest,
    MMEngineError,
    QueueFull,
    RequestFailed,
)
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.vocabulary import Queued
from mmengine.serve.async_engine import open_requests
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.serve.serve_fakes import EchoExecutor, EchoProcessor, builder


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_many_streams_at_once_each_get_their_own_answer():
    async def one(engine, k):
        pieces = []
        async with engine.stream(f"größe {k}", max_tokens=50) as stream:
            async for output in stream:
                pieces.append(output.text)
                assert "\ufffd" not in output.text
        assert "".join(pieces) == stream.completion.text == f"größe {k}".encode().upper().decode()

    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            await asyncio.gather(*(one(engine, k) for k in range(40)))
            assert engine.stats().num_finished == 40
        assert engine._engine.built.closed

    run(main())


def test_rows_decode_while_an_image_is_decoded():
    decoding, go_on = threading.Event(), threading.Event()

    class Slow(EchoProcessor):
        def prepare(self, messages, **options):
            if messages[-1]["content"] == "an image":
                decoding.set()
                assert go_on.wait(20)
            return super().prepare(messages, **options)

    class Waiting(EchoExecutor):
        def collect(self):
            assert self._steps != 3 or decoding.wait(20)
            return super().collect()

    async def main():
        build = builder(processor=Slow(), executor_class=Waiting, media_workers=1)
        async with AsyncEngine(builder=build) as engine:
            row = engine.stream("a text of many steps", max_tokens=50)
            await anext(row)
            image = engine.stream("an image", max_tokens=50)
            async for _ in row:
                pass
            assert row.completion.text == "A TEXT OF MANY STEPS" and decoding.is_set()
            go_on.set()
            assert "".join([output.text async for output in image]) == "AN IMAGE"

    run(main())


def test_a_stop_string_does_not_show_in_the_stream():
    async def main():
        async with AsyncEngine(builder=builder()) as engine, engine.stream("one two", stop=" TW") as stream:
            pieces = [output.text async for output in stream]
            assert "".join(pieces) == "ONE" and stream.completion.finish_reason == "stop"

    run(main())


@pytest.fixture
def held():
    """An executor that blocks in its tenth step until `go_on` is set."""

    class Held(EchoExecutor):
        go_on = threading.Event()

        def collect(self):
            assert self._steps < 9 or self.go_on.wait(20)
            return super().collect()

    yield Held
    Held.go_on.set()


@pytest.mark.parametrize("how", ["aclose", "drop", "break"])
def test_closing_a_stream_cancels_its_request(how, held):
    async def main():
        async with AsyncEngine(builder=builder(executor_class=held)) as engine:
            stream = engine.stream("a prompt that is long enough to be cancelled" * 6, max_tokens=300)
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                assert [output async for output in stream] == []
            elif how == "break":
                async with stream:
                    async for _ in stream:
                        break
            del stream
            gc.collect()
            held.go_on.set()
            while engine._open:
                await asyncio.sleep(0.001)
            assert engine.stats().num_output_tokens < 250
            assert not engine._engine.built.executor.attached

    run(main())


def test_a_refusal_reaches_only_its_caller():
    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            good = asyncio.create_task(engine.generate("good", max_tokens=9))
            with pytest.raises(InvalidMedia):
                await engine.generate("bad", max_tokens=9)
            with pytest.raises(InvalidRequest):
                engine.stream("x", max_tokens=0)
            with pytest.raises(InvalidRequest):
                await engine.generate("x", max_tokens=10**6 + 1, logit_bias={-5: 1000.0})
            assert (await good).text == "GOOD"

    run(main())


def test_open_requests_are_bounded(held):
    async def main():
        build = builder(executor_class=held, max_waiting=2, max_num_seqs=1)
        async with AsyncEngine(builder=build) as engine:
            streams = [engine.stream("some prompt", max_tokens=300) for _ in range(3)]
            with pytest.raises(QueueFull, match="3 requests are open"):
                engine.stream("one more")
            for stream in streams:
                await stream.aclose()
            held.go_on.set()

    run(main())


@pytest.mark.parametrize("late", [False, True])
def test_a_place_is_free_before_the_caller_gets_the_end(late, monkeypatch):
    # A caller that has its answer may send the next request at once, so the place must be free by then.
    told, deliver = [], open_requests.deliver

    def spy(outputs):
        outputs = list(outputs)
        told.extend(channel in engine._open for channel, output in outputs if output.completion)
        return deliver(outputs)

    monkeypatch.setattr(open_requests, "deliver", spy)

    async def main():
        nonlocal engine
        async with AsyncEngine(builder=builder()) as engine:
            await engine.generate("some prompt", max_tokens=3, deadline_s=1e-6 if late else 0)

    engine = None
    with suppress(RequestFailed):
        run(main())
    assert told == [False]


def test_a_processor_that_breaks_ends_its_request_only(monkeypatch):
    real = EchoProcessor.prepare_text

    def prepare_text(self, text, **options):
        if text == "boom":
            raise ZeroDivisionError("division by zero")
        return real(self, text, **options)

    monkeypatch.setattr(EchoProcessor, "prepare_text", prepare_text)

    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            with pytest.raises(ExecutorFailed, match="ZeroDivisionError"):
                await engine.generate("boom")
            assert (await engine.generate("fine", max_tokens=9)).text == "FINE"

    run(main())


def test_an_engine_that_fails_tells_every_waiter_and_later_callers(monkeypatch):
    async def main():
        engine = AsyncEngine(builder=builder())

        def step(received):
            raise OSError("the disk is gone")

        monkeypatch.setattr(engine._engine, "step", step)
        results = await asyncio.gather(*(engine.generate("x") for _ in range(20)), return_exceptions=True)
        assert all(isinstance(result, ExecutorFailed) and "disk" in str(result) for result in results)
        with pytest.raises(ExecutorFailed):
            engine.stream("x")
        await engine.close()

    run(main())


def test_a_failing_step_ends_requests_as_failed():
    async def main():
        async with AsyncEngine(builder=builder(fail_at=1, max_retries=0)) as engine:
            with pytest.raises(RequestFailed, match="fell over"):
                await engine.generate("x", max_tokens=9)
            assert (await engine.generate("y", max_tokens=9)).text == "Y"

    run(main())


def test_a_dead_engine_prints_its_traceback_with_the_step(caplog):
    def broken_step():
        raise ValueError("repeats may not contain negative values")

    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            engine._engine._core.step = broken_step
            await engine.generate("x", max_tokens=9)

    with suppress(AssertionError, MMEngineError):  # the fake executor still has the request
        run(main())
    (record,) = [each for each in caplog.records if each.name == "mmengine.engine"]
    assert "in broken_step" in record.exc_text and "The engine was at step 0" in record.exc_text


@pytest.mark.parametrize("drain", [True, False])
def test_closing_drains_or_cancels(drain, held):
    async def main():
        engine = AsyncEngine(builder=builder(executor_class=held))
        tasks = [asyncio.create_task(engine.generate("some prompt " * 9, max_tokens=300)) for _ in range(12)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close(drain=drain))
        await asyncio.sleep(0)
        held.go_on.set()
        await closing
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if drain:
            assert all(result.text == "SOME PROMPT " * 9 for result in results)
        else:
            failed = [result for result in results if isinstance(result, RequestFailed)]
            assert failed and all(
                result.text == "SOME PROMPT " * 9 for result in results if result not in failed
            )
        with pytest.raises(InvalidRequest, match="closed"):
            engine.stream("x")
        await engine.close()

    run(main())


def test_a_loop_that_ended_does_not_hold_the_engine_up():
    # The first event loop ends while its stream is open. The engine still answers on another loop.
    engine = AsyncEngine(builder=builder())

    async def leave():
        leave.stream = engine.stream("some prompt " * 20, max_tokens=300)

    asyncio.run(leave())

    async def main():
        assert (await engine.generate("x", max_tokens=9)).text == "X"
        await engine.close()

    run(main())
    leave.stream = None


def test_a_closed_engine_refuses_requests():
    async def main():
        engine = AsyncEngine(builder=builder())
        await engine.close()
        for asked in (engine.unload_adapter("a"), engine.sessions()):
            with pytest.raises(InvalidRequest, match="is closed"):
                await asked

    run(main())


def test_a_closed_event_loop_does_not_stop_the_engine():
    begun, go_on = threading.Event(), threading.Event()

    def slowly(engine):
        begun.set()
        assert go_on.wait(20)

    engine = AsyncEngine(builder=builder())

    async def leave():
        asking = asyncio.create_task(engine.on_engine(slowly))
        await asyncio.to_thread(begun.wait, 20)
        asking.cancel()

    run(leave())
    go_on.set()

    async def main():
        assert (await engine.generate("still here", max_tokens=50)).text == "STILL HERE"
        await engine.close()

    run(main())


def test_the_log_is_synced_in_the_background(tmp_path, monkeypatch):
    synced = []

    async def main():
        async with AsyncEngine(builder=builder(), log=tmp_path / "log") as engine:
            core = engine._engine.built.core
            monkeypatch.setattr(engine._engine._syncer, "_sync", lambda: synced.append(core.sync()))
            await engine.generate("x", max_tokens=9)

    run(main())
    assert synced


def test_a_request_is_accepted_when_it_is_in_the_log(tmp_path, monkeypatch):
    commit, room = LogWriter.commit, [False]
    monkeypatch.setattr(LogWriter, "commit", lambda log: room[0] and commit(log))

    async def main():
        engine = AsyncEngine(builder=builder(), log=tmp_path / "log")
        stream, refused = engine.stream("hello", max_tokens=20), engine.stream("bad", max_tokens=20)
        with pytest.raises(InvalidMedia):
            await refused.accepted()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.accepted(), 0.3)
        assert not list((tmp_path / "log").glob("*.mmlog"))
        room[0] = True
        await stream.accepted()
        assert any(isinstance(record.event, Queued) for record in LogReader(tmp_path / "log"))
        assert "".join([output.text async for output in stream]) == "HELLO"
        await stream.accepted()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 30))
