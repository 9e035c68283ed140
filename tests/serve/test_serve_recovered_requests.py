"""Tests that the next process resumes the requests in a log, and streams them from the first token on."""

import asyncio

import pytest

from mmengine.core.resume import Resume, read_resume_state
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from tests.serve.serve_fakes import EchoExecutor, builder

LONG = "a rather long text"


class Leaving(EchoExecutor):
    """An executor that may be closed while requests run."""

    def close(self):
        self.attached.clear()
        super().close()


def leave(log, steps=6):
    """Write a log with three undelivered requests, each running or ended, and a cancelled request."""
    with Engine(builder=builder(executor_class=Leaving), log=log) as engine:
        engine.submit("hi", request_id="short", max_tokens=50, envelope=b"of the short one")
        engine.submit(LONG, request_id="long", max_tokens=50, envelope=b"of the long one")
        engine.submit(LONG, request_id="both", max_tokens=50, n=2)
        engine.submit(LONG, request_id="gone", max_tokens=50)
        for _ in range(steps):
            engine.step(received=False)
        engine.cancel("gone")
        engine.step(received=False)


def taking_up(log):
    return AsyncEngine(builder=builder(executor_class=Leaving), log=log, resume=Resume())


async def all_of(stream):
    """Return (text of each choice, finish reason of each choice, number of outputs)."""
    texts, ends, count = {}, {}, 0
    async for output in stream:
        texts[output.index] = texts.get(output.index, "") + output.text
        if output.finish_reason is not None:
            ends[output.index] = output.finish_reason
        count += 1
    return texts, ends, count


def run(main):
    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("steps", [1, 6, 40])
def test_recovered_requests_stream_from_the_first_token_on(tmp_path, steps):
    leave(tmp_path / "log", steps)

    async def main():
        async with taking_up(tmp_path / "log") as engine:
            left = {each.request_id: each for each in engine.recovered_requests()}
            left.pop("gone", None)  # recovered only if the request ended before the cancellation
            assert left.keys() == {"short", "long", "both"}
            assert left["long"].envelope == b"of the long one" and left["both"].num_choices == 2
            assert left["short"].has_ended == (steps > 3) and left["long"].has_ended == (steps > 30)
            for name, text in (("short", "HI"), ("long", LONG.upper()), ("both", LONG.upper())):
                stream = engine.attach(name)
                await stream.accepted()
                texts, ends, count = await all_of(stream)
                choices = range(left[name].num_choices)
                assert texts == dict.fromkeys(choices, text) and ends == dict.fromkeys(choices, "stop")
                assert [choice.text for choice in stream.completion.choices] == [text for _ in choices]
                assert count <= len(choices) * (len(text) + 1)
                with pytest.raises(InvalidRequest, match="waits to be attached"):
                    engine.attach(name)
            assert {each.request_id for each in engine.recovered_requests()} <= {"gone"}
            assert (await engine.generate("and new ones", max_tokens=50)).text == "AND NEW ONES"

    run(main)
    report = verify(tmp_path / "log")
    assert report.ok and not report.unfinished


def test_leaving_a_recovered_request_cancels_it(tmp_path):
    leave(tmp_path / "log")

    async def main():
        async with taking_up(tmp_path / "log") as engine:
            stream = engine.attach("long")
            await anext(stream)
            await stream.aclose()
            while engine._open or engine._open.running:
                await asyncio.sleep(0.01)

    run(main)
    assert verify(tmp_path / "log").ok


def test_unclaimed_requests_stay_for_the_next_process(tmp_path):
    leave(tmp_path / "log")

    async def main():
        for _ in range(2):
            async with taking_up(tmp_path / "log") as engine:
                assert {each.request_id for each in engine.recovered_requests()} == {"short", "long", "both"}
                assert (await engine.generate("meanwhile", max_tokens=50)).text == "MEANWHILE"
        async with taking_up(tmp_path / "log") as engine:
            texts, _, _ = await all_of(engine.attach("long"))
            assert texts == {0: LONG.upper()}

    run(main)


def undelivered(log):
    return set(read_resume_state(log, Resume()).answers)


def test_a_request_cancelled_before_its_acceptance_is_not_kept(tmp_path):
    leave(tmp_path / "log")
    assert "gone" in undelivered(tmp_path / "log")

    async def main():
        async with taking_up(tmp_path / "log") as engine:
            assert "gone" not in {each.request_id for each in engine.recovered_requests()}
            await engine.generate("meanwhile", max_tokens=50)

    run(main)
    assert undelivered(tmp_path / "log") == {"short", "long", "both/0", "both/1"}
    assert verify(tmp_path / "log").ok


@pytest.mark.parametrize(("how", "choice"), [("given up", 0), ("given up", 1), ("delivered", 0)])
def test_choices_of_an_incomplete_request_cannot_be_claimed(tmp_path, how, choice):
    """A choice was cancelled (and in one case delivered) before the process ended. The next process drops the
    request's answers.
    """
    with Engine(builder=builder(executor_class=Leaving), log=tmp_path / "log") as engine:
        engine.submit(LONG, request_id="both", max_tokens=50, n=2)
        for _ in range(6):
            engine.step(received=False)
        engine._core.cancel(f"both/{choice}")
        engine.step(received=False)
        if how == "delivered":
            engine.requests.delivered("both")
        engine.step(received=False)
    assert len(undelivered(tmp_path / "log")) == (1 if how == "delivered" else 2)

    async def main():
        async with taking_up(tmp_path / "log") as engine:
            for left in engine.recovered_requests():
                await all_of(engine.attach(left.request_id))
            assert (await engine.generate("meanwhile", max_tokens=50)).text == "MEANWHILE"
            assert engine.recovered_requests() == [] and not engine._engine.requests.resumed

    run(main)
    assert not undelivered(tmp_path / "log")
    assert verify(tmp_path / "log").ok


def test_nothing_is_left_without_a_log():
    async def main():
        async with AsyncEngine(builder=builder()) as engine:
            assert engine.recovered_requests() == []
            with pytest.raises(InvalidRequest, match="'x' of the previous process"):
                engine.attach("x")

    run(main)


def test_recovered_requests_share_a_form(tmp_path):
    """The log stores a response format once. Each request that uses the format is recovered with it."""
    properties = {f"property{number}": {"type": "string"} for number in range(20)}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": properties}}}
    with Engine(builder=builder(executor_class=Leaving), log=tmp_path / "log") as engine:
        for name in ("one", "two"):
            engine.submit(LONG, request_id=name, max_tokens=50, response_format=form)
        for _ in range(6):
            engine.step(received=False)

    async def main():
        async with taking_up(tmp_path / "log") as engine:
            one, two = (left.queued.grammar for left in engine.recovered_requests())
            assert one == two and "property19" in one.source
            for left in engine.recovered_requests():
                engine.give_up(left.request_id)

    run(main)


def test_the_log_verifies_after_answers_are_delivered_during_others(tmp_path):
    with Engine(builder=builder(executor_class=Leaving), log=tmp_path / "log") as engine:
        for name in ("hi", LONG):
            engine.submit(name, request_id=name, max_tokens=50)
        for _ in range(8):
            engine.step(received=False)
        engine.requests.delivered("hi")
    names = [type(record.event) for record in LogReader(tmp_path / "log")]
    assert (
        names[-2:] == [ev.Delivered, ev.Checkpoint] and ev.Executed not in names[names.index(ev.Delivered) :]
    )
    assert verify(tmp_path / "log").ok
    with Engine(builder=builder(executor_class=Leaving), log=tmp_path / "log", resume=Resume()) as engine:
        for _ in range(30):
            engine.step(received=False)
    assert verify(tmp_path / "log").ok
