"""Tests that a request moves to another replica if its replica dies, hangs, drains or refuses the request."""

import asyncio
import random
import time

import pytest

from mmengine.errors import ExecutorFailed, ExecutorLost, InvalidRequest, QueueFull, RequestFailed
from mmengine.fleet.attempt import RoutingLimits
from mmengine.fleet.engine import FleetEngine
from mmengine.fleet.replica import Replica
from mmengine.fleet.wire import (
    Accepted,
    Outputs,
    Rejection,
    ReplicaName,
    ReplicaRequest,
    decode_message,
    decode_request,
    encode,
    wire_prompt,
)
from mmengine.request import SamplingParams
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.prompt.prompt import Prompt
from mmengine.serve.text.reasoning import NO_REASONING
from tests.fleet.carriers import LocalCarrier, ReplicaProcess, SocketCarrier
from tests.serve.serve_fakes import EchoExecutor, EchoProcessor, builder
from tests.server.running import SlowEcho

TEXT = "the quick brown fox jumps over the lazy dog " * 3
CONFIG = builder()(stop_watcher_factory=lambda tokenizer: None).config
SHORT = RoutingLimits(silence_s=0.4, patience_s=20.0)


def replica(name, executor_class=SlowEcho, *, beat_s=0.05, hang_s=60.0, **config):
    engine = AsyncEngine(builder=builder(executor_class=executor_class, **config))
    return Replica(name, engine, beat_s=beat_s, hang_s=hang_s)


def fleet(*replicas, patience=SHORT, max_open=64):
    carrier = LocalCarrier(*replicas)
    return FleetEngine(carrier, EchoProcessor(), replicas[0].engine.config, max_open, patience), carrier


async def closed(engine, *replicas):
    await engine.close(drain=False)
    for each in replicas:
        await each.engine.close(drain=False)


async def told(stream, sometimes=None):
    """Return the text and the finish reasons by choice. Calls `sometimes` after each output."""
    said = {}
    async with stream:
        async for output in stream:
            text, ends = said.get(output.index, ("", []))
            said[output.index] = (
                text + output.text,
                ends + [output.finish_reason] * bool(output.finish_reason),
            )
            if sometimes is not None:
                sometimes()
    assert stream.completion is not None and len(stream.completion.choices) == len(said)
    for choice in stream.completion.choices:
        assert said[choice.index] == (choice.text, [choice.finish_reason])
    return said


def test_replicas_are_cut_off_one_after_the_other():
    async def go():
        chosen, kept = random.Random(5), [replica(name) for name in "abcdef"]
        engine, carrier = fleet(*kept, patience=SHORT._replace(deaths=100))
        streams = [engine.stream(Prompt(text=f"{n} {TEXT}"), max_tokens=300, n=1 + n % 3) for n in range(8)]
        tasks = [asyncio.create_task(told(stream)) for stream in streams]
        for each in chosen.sample(kept, 5):
            await asyncio.sleep(chosen.random() * 0.1)
            carrier.lose(each.name)
        found = await asyncio.gather(*tasks)
        for n, said in enumerate(found):
            wanted = f"{n} {TEXT}".upper()
            assert said == {index: (wanted, ["stop"]) for index in range(1 + n % 3)}
        assert engine.metrics.num_tokens == sum((len(TEXT) + 3) * (1 + n % 3) for n in range(8))
        assert engine.metrics.moves._value.get() >= 5 and not engine._open
        asked = [decode_request(data) for _, data in carrier.calls]
        assert any(ask.outputs and ask.sample_index for ask in asked), "none moved in the middle"
        await closed(engine, *kept)

    asyncio.run(go())


def test_a_drained_replica_ends_at_once():
    async def go():
        first, second = replica("a"), replica("b")
        engine, carrier = fleet(first, second)
        tasks = [asyncio.create_task(told(engine.stream(Prompt(text=f"{n}{TEXT}")))) for n in range(6)]
        while not (first.load().num_open and second.load().num_open):
            await asyncio.sleep(0.01)
        first.leave("it drains")
        while first.load().num_open:
            await asyncio.sleep(0.005)
        assert engine.metrics.moves._value.get(), "its requests moved instead of ending there"
        assert [said[0][0] for said in await asyncio.gather(*tasks)] == [
            f"{n}{TEXT}".upper() for n in range(6)
        ]
        carrier.leaving.add("a")  # an ingress calls no replica that is known to leave
        carrier.calls.clear()
        assert (await told(engine.stream(Prompt(text=TEXT))))[0][1] == ["stop"]
        assert {name for name, _ in carrier.calls} == {"b"}
        await closed(engine, first, second)

    asyncio.run(go())


class Stuck(SlowEcho):
    """An executor whose step 20 does not return until the test ends."""

    until: "asyncio.Event | None" = None
    may_end = False

    def collect(self):
        while self._steps == 20 and not Stuck.may_end:
            time.sleep(0.01)
        return super().collect()


def test_hanging_and_silent_replicas_are_left():
    async def go():
        Stuck.may_end = False
        stuck, silent, good = replica("a", Stuck, hang_s=0.2), replica("b"), replica("c")
        engine, carrier = fleet(stuck)
        carrier.replicas["b"] = silent
        said = asyncio.create_task(told(engine.stream(Prompt(text=TEXT))))
        while stuck.engine.stats().steps < 20:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        with pytest.raises(ExecutorFailed, match="a step has not returned for 0 seconds"):
            stuck.check()
        silent.check()
        silent.run = silent_run
        carrier.replicas["c"] = good
        assert (await said)[0] == (TEXT.upper(), ["stop"])
        Stuck.may_end = True
        await closed(engine, stuck, silent, good)

    async def silent_run(data):
        await asyncio.sleep(1000)
        yield b""

    asyncio.run(go())


class Fails(EchoExecutor):
    def collect(self):
        raise ExecutorLost("the device is gone")


def test_an_engine_that_stopped_is_a_reason_to_move_and_to_be_unhealthy():
    async def go():
        bad, good = replica("a", Fails), replica("b")
        engine, _ = fleet(bad, good)
        answers = await asyncio.gather(*(told(engine.stream(Prompt(text=f"{n}{TEXT}"))) for n in range(6)))
        assert all(said[0][1] == ["stop"] for said in answers)
        good.check()
        with pytest.raises(ExecutorFailed, match="the device is gone"):
            bad.check()
        await closed(engine, bad, good)

    asyncio.run(go())


@pytest.mark.parametrize("words", [[], [Accepted(NO_REASONING, None, {}, 3)]], ids=["at once", "in a step"])
def test_a_request_that_kills_every_replica_fails(words):
    async def go():
        kept = [replica(name) for name in "abcd"]
        engine, carrier = fleet(*kept)

        def kill(name):
            async def run(data):
                for word in (ReplicaName(name), *words):
                    yield encode(word)
                carrier.lose(name)
                await asyncio.sleep(1000)

            return run

        for each in kept:
            each.run = kill(each.name)
        with pytest.raises(RequestFailed, match="3 replicas in a row ended without a token of this request"):
            await told(engine.stream(Prompt(text=TEXT)))
        assert len(carrier.replicas) == 1
        await closed(engine, *kept)

    asyncio.run(go())


def test_an_accepted_request_waits_when_all_replicas_are_full():
    """Only a request that was never accepted is refused."""

    async def go():
        one, two = replica("a"), replica("b")
        engine, carrier = fleet(one, two)
        call, full = carrier.call, [True] * 3

        async def call_unless_full(key, data):
            if len(carrier.replicas) == 1 and full:
                full.pop()
                raise QueueFull("the queue before all replicas is full")
            async for word in call(key, data):
                yield word

        carrier.call = call_unless_full
        stream = engine.stream(Prompt(text=TEXT))
        said = asyncio.create_task(told(stream))
        await stream.accepted()
        carrier.lose(carrier.calls[0][0])
        assert (await said)[0] == (TEXT.upper(), ["stop"]) and not full
        full.append(True)
        with pytest.raises(QueueFull, match="before all replicas"):
            await engine.generate(Prompt(text=TEXT))
        await closed(engine, one, two)

    asyncio.run(go())


def test_a_fleet_refuses_requests_like_an_engine():
    async def go():
        one = replica("a", max_num_seqs=1, max_waiting=1)
        engine, carrier = fleet(one, max_open=3)
        with pytest.raises(InvalidRequest, match="temperature"):
            engine.stream(Prompt(text="a"), temperature=-1)
        with pytest.raises(InvalidRequest, match="set by the fleet"):
            engine.stream(Prompt(text="a"), outputs=[1])
        with pytest.raises(InvalidRequest, match="image 1 is no image"):
            await engine.generate(Prompt(text="bad"))
        with pytest.raises(InvalidRequest, match="image 1 is no image"):
            await engine.count(Prompt(text="bad"))
        assert await engine.count(Prompt(text=TEXT)) == len(TEXT) and engine.can_end_reasoning
        streams = [engine.stream(Prompt(text=TEXT), request_id=f"r{n}") for n in range(3)]
        with pytest.raises(QueueFull, match="3 requests are open"):
            engine.stream(Prompt(text=TEXT))
        with pytest.raises(QueueFull, match="2 requests are open"):
            await asyncio.gather(*(stream.accepted() for stream in streams))
        for stream in streams:
            stream.cancel()
        await engine.close()
        carrier.lose("a")
        await closed(engine, one)

    asyncio.run(go())


def test_cancellations_and_deadlines_hold_across_replicas():
    async def go():
        one, two = replica("a"), replica("b")
        engine, carrier = fleet(one, two)
        stream = engine.stream(Prompt(text=TEXT))
        await stream.accepted()
        await anext(stream)
        with pytest.raises(InvalidRequest, match="choose another"):
            engine.stream(Prompt(text=TEXT), request_id=stream.request_id)
        stream.cancel()
        said = [output async for output in stream]
        assert said[-1].finish_reason == "abort" and stream.completion is not None
        while one.load().num_open or two.load().num_open or one.engine.stats().num_running:
            await asyncio.sleep(0.01)
        late = engine.stream(Prompt(text=TEXT), deadline_s=0.6)
        await late.accepted()
        for name in list(carrier.replicas):
            carrier.lose(name)
        assert [output async for output in late][-1].detail == "deadline"
        assert engine.readiness().ready
        await closed(engine, one, two)

    asyncio.run(go())


@pytest.mark.soak
def test_the_last_replica_is_taken_though_it_was_dodged():
    # A request avoids a replica that was lost, but returns to this replica if there is no other.
    async def go():
        one = replica("a")
        engine, carrier = fleet(one)
        said = asyncio.create_task(told(engine.stream(Prompt(text=TEXT))))
        while not one.load().num_open or one.load().waiting_tokens:
            await asyncio.sleep(0.01)
        carrier.lose("a")
        carrier.replicas["a"] = one  # only the connection to the replica broke
        assert (await said)[0] == (TEXT.upper(), ["stop"])
        await closed(engine, one)

    asyncio.run(go())


def test_a_repeated_attempt_does_not_block_itself():
    """A carrier may close a call and repeat it before a step has ended the first call's request."""

    async def go():
        one = replica("a")
        prompt = wire_prompt(Prompt(text=TEXT))
        data = encode(ReplicaRequest("r", prompt, SamplingParams(seed=1), route="j"))
        for number in range(4):
            words = one.run(data)
            async for word in words:
                if isinstance(decode_message(word), Accepted) or number == 1:
                    break  # the second call is closed before the request is accepted
            await words.aclose()
        said = [decode_message(word) async for word in one.run(data)]
        assert isinstance(said[-1], Outputs) and said[-1].end is not None, said[-1]
        other = encode(ReplicaRequest("r", prompt, SamplingParams(seed=1), route="another"))
        first = one.run(data)
        while not isinstance(decode_message(await anext(first)), Accepted):
            pass
        refused = [decode_message(word) async for word in one.run(other)][-1]
        assert isinstance(refused, Rejection) and "choose another" in refused.text
        await first.aclose()
        while one._runs:
            await asyncio.sleep(0.01)
        await closed(one.engine)

    asyncio.run(go())


@pytest.mark.soak
def test_processes_that_are_killed_and_frozen(tmp_path):
    """The replicas are separate processes with sockets and logs."""
    kept = [ReplicaProcess(tmp_path, name) for name in "abc"]

    async def go():
        patience = RoutingLimits(silence_s=1.0, patience_s=20)
        engine = FleetEngine(SocketCarrier(tmp_path), EchoProcessor(), CONFIG, 64, patience)
        streams = [engine.stream(Prompt(text=f"{n} {TEXT}"), request_id=f"r{n}") for n in range(12)]
        tasks = [asyncio.create_task(told(stream)) for stream in streams]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        await asyncio.to_thread(kept[0].kill)
        await asyncio.sleep(0.05)
        kept[1].freeze()
        (tmp_path / "b.sock").unlink()
        found = await asyncio.gather(*tasks)
        assert [said[0] for said in found] == [(f"{n} {TEXT}".upper(), ["stop"]) for n in range(12)]
        await engine.close()

    try:
        for each in kept:
            each.wait_until_it_listens()
        asyncio.run(go())
    finally:
        for each in kept:
            each.kill()
