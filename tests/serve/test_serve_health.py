"""Tests that stalls appear in readiness and metrics."""

import asyncio
import errno
import threading
from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mmengine.core.outputs import Stats
from mmengine.core.state.policy import Policy, register_policy
from mmengine.errors import MMEngineError
from mmengine.events.log import LogWriter
from mmengine.serve.async_engine.async_engine import AsyncEngine
from mmengine.serve.engine.engine import Engine
from mmengine.serve.requests import metrics
from tests.serve.serve_fakes import builder


def samples(text):
    """Return metric values by (name, label values)."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_an_engine_that_works_is_ready_and_counts():
    with Engine(builder=builder()) as engine:
        assert engine.readiness() and engine.readiness().reasons == ()
        engine.generate(["one", "two and a half", "one"], max_tokens=9)
        engine.cancel(engine.submit("never read", max_tokens=9))
        while engine.has_work:
            engine.step()
        found, stats = samples(engine.metrics_text()), engine.stats()
        registry = CollectorRegistry()
        registry.register(engine.metrics)
        assert registry.get_sample_value("mmengine_steps_total") == stats.steps
    assert found["mmengine_steps_total",] == stats.steps > 0
    assert found["mmengine_output_tokens_total",] == stats.num_output_tokens > 0
    assert found["mmengine_kv_blocks",] == stats.kv_blocks_total
    assert found["mmengine_requests_finished_total", "abort"] == 1
    assert sum(found["mmengine_requests_finished_total", reason] for reason in metrics.REASONS) == 4
    assert found["mmengine_ready",] == 1 and found["mmengine_requests_running",] == 0
    for name in ("time_to_first_token", "request", "time_per_output_token"):
        assert found[f"mmengine_{name}_seconds_count",] == 3
        assert found[f"mmengine_{name}_seconds_bucket", "+Inf"] == 3


def test_every_counter_of_the_core_is_a_metric():
    told = {*metrics.COUNTERS, *metrics.GAUGES, *metrics.STALLS, *metrics.ELSEWHERE}
    assert told == {field.name for field in fields(Stats)}


def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("mmengine.serve.requests.health.STALL_PAUSE_S", 0.001)
    with Engine(builder=builder(), log=tmp_path / "log") as engine:
        engine.submit("hello", max_tokens=9)
        engine.step()
        with monkeypatch.context() as broken:
            broken.setattr(LogWriter, "_write", full)
            engine.step()
            assert "No space left" in engine.readiness().reasons[0]
            assert samples(engine.metrics_text())["mmengine_ready",] == 0
        while engine.has_work:
            engine.step()
        assert engine.readiness()
    assert engine.readiness().reasons == ("the engine is closed",)


def full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_progress(monkeypatch):
    with Engine(builder=builder()) as engine:
        with monkeypatch.context() as broken:
            broken.setattr("mmengine.core.decide.scheduler.Scheduler.schedule", lambda self, view: None)
            name = engine.submit("waits", max_tokens=9)
            with pytest.raises(MMEngineError, match="no progress"):
                engine.step()
            assert [reason[:11] for reason in engine.readiness().reasons] == ["no progress"]
            found = samples(engine.metrics_text())
        assert found["mmengine_stalls_total", "no_progress"] == 1 and found["mmengine_ready",] == 0
        engine.step()
        assert engine.readiness(), "it goes on"
        engine.cancel(name)
        while engine.has_work:
            engine.step()


def test_a_request_that_is_preempted_again_and_again():
    policy = Policy(lambda known: (-known.arrival,), lambda view: int(view.running[0]))
    register_policy("sends the first away, served", policy)
    settings = {
        "max_num_seqs": 2,
        "token_budget": 16,
        "max_model_len": 40,
        "block_size": 4,
        "num_blocks": 11,
        "admission_reserve": "none",
        "enable_prefix_caching": False,
        "thrash_limit": 3,
        "policy": "sends the first away, served",
        "long_prefill_token_threshold": 4,
    }
    with Engine(builder=builder(**settings)) as engine:
        names = [engine.submit(letter * 36, max_tokens=3) for letter in "ab"]
        for _ in range(400):
            engine.step()
            if not engine.readiness():
                break
        (reason,) = engine.readiness().reasons
        assert "was preempted 3 times without a token" in reason and "raise num_blocks" in reason
        found = samples(engine.metrics_text())
        assert found["mmengine_stalls_total", "thrash"] == 1 and found["mmengine_ready",] == 0
        for name in names:
            engine.cancel(name)
        while engine.has_work:
            engine.step()
        assert engine.readiness(), "no request is left"


def test_a_thrash_is_forgotten_after_some_steps(monkeypatch):
    monkeypatch.setattr("mmengine.serve.requests.health.THRASH_STEPS", 2)
    with Engine(builder=builder()) as engine:
        engine.submit("a prompt of some length", max_tokens=20)
        engine.step()
        from mmengine.events.vocabulary import Stalled

        engine._core.last_stall = (engine._core.state.step, Stalled("thrash", "x", "preempted 3 times"))
        assert not engine.readiness()
        for _ in range(3):
            engine.step()
        assert engine.readiness()
        while engine.has_work:
            engine.step()


def test_a_thread_that_died_says_why(monkeypatch):
    async def main():
        engine = AsyncEngine(builder=builder())
        assert engine.readiness()
        monkeypatch.setattr("mmengine.core.decide.scheduler.Scheduler.schedule", lambda self, view: None)
        with pytest.raises(MMEngineError, match="no progress"):
            await engine.generate("hello", max_tokens=9)
        await engine.close()
        (reason,) = engine.readiness().reasons
        assert reason.startswith("the engine stopped: no progress at step 0")
        assert samples(engine.metrics_text())["mmengine_ready",] == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_step_that_hangs(monkeypatch):
    monkeypatch.setattr("mmengine.serve.async_engine.async_engine.STEP_LIMIT_S", 0.05)
    hangs, goes_on = threading.Event(), threading.Event()

    def make(*args, **options):
        built = builder()(*args, **options)
        collect = built.executor.collect

        def slow():
            hangs.set()
            assert goes_on.wait(60)
            return collect()

        built.executor.collect = slow
        return built

    async def main():
        async with AsyncEngine(builder=make) as engine:
            answer = asyncio.create_task(engine.generate("hello", max_tokens=9))
            await asyncio.to_thread(hangs.wait, 60)
            while engine.readiness():
                await asyncio.sleep(0.01)
            assert "a step has not returned for" in engine.readiness().reasons[0]
            goes_on.set()
            assert (await answer).text == "HELLO"
            while not engine.readiness():
                await asyncio.sleep(0.01)
        assert engine.readiness().reasons == ("the engine stopped: it was closed",)

    asyncio.run(asyncio.wait_for(main(), 60))
