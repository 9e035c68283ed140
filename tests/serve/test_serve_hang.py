"""Tests that a new engine continues the log and the streams after a hanging step."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from mmengine.errors import ExecutorFailed, RequestFailed
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.models.progress import report_step
from mmengine.replay.verify import verify
from mmengine.serve.async_engine.admission import Admission
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.requests import health
from mmengine.serve.requests.health import Watchdog
from tests.serve import serve_fakes as fakes


class Hanging(fakes.EchoExecutor):
    """Hangs in a step with the prompt "killer" until `released` is set. Only this step advances the
    watchdog's clock, so a slow machine causes no hang.
    """

    released = threading.Event()
    now_s = 1.0

    def dispatch(self, plan):
        super().dispatch(plan)
        self.texts = [bytes(self._rows[row].prompt_token_ids.tolist()) for row in plan.rows.tolist()]

    def collect(self):
        if any(b"killer" in text for text in self.texts) and not self.released.is_set():
            Hanging.now_s += 2
            self.released.wait()
        return super().collect()

    def close(self):
        """Do nothing: another engine has the requests."""


@pytest.fixture
def hanging(monkeypatch):
    Hanging.released = threading.Event()
    watch = SimpleNamespace(monotonic=lambda: Hanging.now_s, sleep=time.sleep)
    monkeypatch.setattr(health, "time", watch)
    yield fakes.builder(executor_class=Hanging, step_timeout_s=1, max_num_seqs=8)
    Hanging.released.set()


async def answer(engine, text):
    pieces = []
    async with engine.stream(text, max_tokens=60) as stream:
        async for output in stream:
            pieces.append(output.text)
    return "".join(pieces), stream.completion


def test_streams_go_on_and_the_killer_fails(hanging, tmp_path, monkeypatch):
    collect, prepared, came = Hanging.collect, Admission._prepared, threading.Event()

    def held(self):  # keeps the other streams running until the killer is submitted
        assert self._steps < 5 or came.wait(20)
        return collect(self)

    def noted(self, request, result):
        prepared(self, request, result)
        if result.text == "killer":
            came.set()

    monkeypatch.setattr(Hanging, "collect", held)
    monkeypatch.setattr(Admission, "_prepared", noted)

    async def main():
        engine = AsyncEngine(builder=hanging, log=tmp_path / "log")
        texts = [f"a rather long text number {k}" for k in range(3)]
        running = [asyncio.create_task(answer(engine, text)) for text in texts]
        await asyncio.sleep(0)
        killer = asyncio.create_task(answer(engine, "killer"))
        for text, (streamed, completion) in zip(texts, await asyncio.gather(*running), strict=True):
            assert streamed == completion.text == text.upper() and completion.finish_reason == "stop"
        _, completion = await killer
        assert completion.finish_reason == "error" and "hang: a step" in completion.choices[0].detail
        assert (await engine.generate("once more")).text == "ONCE MORE"
        assert engine.readiness().ready
        Hanging.released.set()
        time.sleep(0.1)  # Gives the released threads time to wake up.
        assert (await engine.generate("and again")).text == "AND AGAIN"
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished, report.divergence
    events = [record.event for record in LogReader(tmp_path / "log")]
    failed = [event for event in events if isinstance(event, ev.Failed)]
    assert 1 <= len(failed) == sum(isinstance(event, ev.Recovered) for event in events) <= 4
    ends = [type(event) for event in events if isinstance(event, ev.Recovered | ev.Finished)]
    assert ends[0] is ev.Recovered, "no stream had ended before"


def test_a_deadline_holds_after_a_hang(hanging, tmp_path, monkeypatch):
    """The new engine gets the request with the remaining time as its deadline."""
    asked = []
    submit = Engine.submit_prepared
    monkeypatch.setattr(Engine, "submit_prepared", lambda *a: (asked.append(a[2].deadline_s), submit(*a))[1])
    dispatch, prepared = Hanging.dispatch, Admission._prepared
    dispatched, came = threading.Event(), threading.Event()

    def slow(self, plan):  # waits for the second request before the first request's step hangs
        dispatch(self, plan)
        if any(b"killer" in text for text in self.texts):
            dispatched.set()
            assert came.wait(20)

    def noted(self, request, result):
        is_late = dispatched.is_set()
        prepared(self, request, result)
        if is_late:
            came.set()

    monkeypatch.setattr(Hanging, "dispatch", slow)
    monkeypatch.setattr(Admission, "_prepared", noted)

    async def main():
        engine = AsyncEngine(builder=hanging, log=tmp_path / "log")
        killer = asyncio.create_task(answer(engine, "killer"))
        await asyncio.to_thread(dispatched.wait, 20)
        late = engine.stream("comes while the step hangs", max_tokens=60, deadline_s=40)
        async with late:
            assert "".join([output.text async for output in late]).startswith("COMES")
        await killer
        await engine.close(drain=False)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(asked) >= 3 and asked[-1] < asked[1] < 40, (
        "the late request must be submitted again, with less time left"
    )


def test_a_session_and_its_caller_have_the_same_answer_after_a_hang(hanging, tmp_path, monkeypatch):
    """The caller's request runs when another request's step hangs. A request that was never scheduled ends
    with an error, and is not part of its session.
    """
    dispatch, prepared = Hanging.dispatch, Admission._prepared
    begun, dispatched = threading.Event(), threading.Event()
    came = {text: threading.Event() for text in ("killer", "late>")}

    class Slow(fakes.TurnEcho):
        def prepare_turn(self, content, **options):
            made = super().prepare_turn(content, **options)
            assert made.text != "late>" or dispatched.wait(20)
            return made

    def held(self, plan):  # waits until the killer runs with the question, and the late request is prepared
        if dispatched.is_set():  # another engine took over
            Hanging.released.set()
        elif begun.is_set():
            assert came["killer"].wait(20)
        dispatch(self, plan)
        if any(b"q" in text for text in self.texts):
            begun.set()
        if b"killer" in self.texts and not dispatched.is_set():
            dispatched.set()
            assert came["late>"].wait(20)

    def noted(self, request, result):
        prepared(self, request, result)
        if result.text in came:
            came[result.text].set()

    monkeypatch.setattr(Hanging, "dispatch", held)
    monkeypatch.setattr(Admission, "_prepared", noted)
    echo = fakes.builder(executor_class=Hanging, processor=Slow(), step_timeout_s=1)

    async def main():
        engine = AsyncEngine(builder=echo, log=tmp_path / "log")
        session, other = [await engine.session(name) for name in ("door", "window")]
        await session.append("abc")
        await other.append("not ")
        late = asyncio.create_task(other.ask("late", max_tokens=20))
        asked = asyncio.create_task(session.ask("q" * 40, max_tokens=60))
        await asyncio.to_thread(begun.wait, 20)
        killer = asyncio.create_task(answer(engine, "killer"))
        with pytest.raises(RequestFailed, match="send the request again"):
            await late
        done, facts = await asked, await session.facts()
        assert done.text == "<ABC" + "Q" * 40 + ">" and len(done.prompt_token_ids) == 45
        assert facts.num_requests == 2 and facts.answer == done.choices[0].token_ids
        assert (await other.ask("late", max_tokens=20)).text == "<NOT LATE>"
        await killer
        await engine.close()
        assert not engine._open.running and not engine._engine.requests.resumed

    asyncio.run(asyncio.wait_for(main(), 30))
    assert verify(tmp_path / "log").ok


def test_without_a_log_all_streams_get_the_error(hanging):
    async def main():
        engine = AsyncEngine(builder=hanging)
        with pytest.raises(ExecutorFailed, match="made no progress for 1 seconds"):
            await engine.generate("killer")
        assert not engine.readiness().ready
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_engine_that_does_not_wait_for_its_device_is_not_abandoned(tmp_path):
    # If no step hangs in a call to the device, `abandon` returns False, and the engine continues.
    engine = Engine(builder=fakes.builder(), log=tmp_path / "log")
    assert not engine.abandon()
    assert engine.generate(["hello"], max_tokens=20)[0].text == "HELLO"
    engine.close()
    assert verify(tmp_path / "log").ok


def test_a_long_step_that_reports_progress_is_no_hang(hanging):
    """A step that reports progress may exceed the limit. A silent step may not."""

    class Slow(Hanging):
        def collect(self):
            if self._steps == 0:
                for _ in range(4):
                    Hanging.now_s += 0.8
                    time.sleep(0.15)  # Gives the watchdog time to check the clock.
                    report_step()
            return super().collect()

    barked = threading.Event()
    engine = Engine(builder=fakes.builder(executor_class=Slow, step_timeout_s=1), on_hang=barked.set)
    engine.submit("hello", max_tokens=20)
    engine.step(), engine.step()
    assert not barked.is_set()
    engine.submit("killer", max_tokens=20)
    stuck = threading.Thread(target=lambda: [engine.step() for _ in range(3)], daemon=True)
    stuck.start()
    assert barked.wait(20)
    Hanging.released.set()
    stuck.join()
    engine.close()


def test_the_watchdog_reports_once_and_only_inside_its_block():
    # The watchdog is armed only within `with dog`.
    barks, barked = [], threading.Event()
    dog = Watchdog(0.1, lambda: (barks.append(1), barked.set()))
    for _ in range(3):
        with dog:
            pass
    time.sleep(0.3)
    assert not barks
    with dog:
        assert barked.wait(20)
        time.sleep(0.3)
    assert barks == [1]
    dog.close()
