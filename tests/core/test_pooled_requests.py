"""Tests pooled requests: prefill-only requests whose result is a vector."""

import hashlib
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.state import State
from mmengine.errors import ErrorCode, InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import verify
from mmengine.request import PREFILL, Pooling, Request, SamplingParams
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, image, request, settings_of
from tests.core.workloads import small_config, small_request

EMBED = Pooling("embed")


def pooled(name: str, prompt: int | list[int], **fields) -> Request:
    ask = request(name, prompt, **fields)
    return Request(name, ask.prompt_token_ids, PREFILL, ask.media, pooling=EMBED)


def run(core: EngineCore) -> dict[str, tuple[str, list[float] | None]]:
    """Run to the end and return each request's finish reason and vector."""
    ends = {}
    while core.has_work:
        for output in core.step():
            assert not output.token_ids or output.vector is None
            if output.finish_reason is not None:
                vector = None if output.vector is None else output.vector.tolist()
                ends[output.request_id] = output.finish_reason, vector
    return ends


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_pooled_request_ends_with_its_vector(max_in_flight):
    bench = Bench(max_in_flight=max_in_flight, token_budget=8)
    bench.submit(pooled("long", 21), request("chat", 5), pooled("short", [7]), pooled("twin", 21))
    bench.submit(Request("like", request("long", 21).prompt_token_ids, PREFILL, pooling=EMBED))
    ends = run(bench.core)
    events = [record.event for record in bench.log.records]
    assert {name: reason for name, (reason, _) in ends.items()} == {
        **dict.fromkeys(("long", "short", "twin", "like"), "pooled"),
        "chat": "length",
    }
    assert ends["long"] == ends["like"] != ends["twin"]
    assert ends["long"][1] is not None and len(ends["long"][1]) == 4
    found = [entry for event in events if isinstance(event, ev.Executed) for entry in event.pooled]
    digest = hashlib.sha256(np.array(ends["short"][1], np.float32).tobytes()).digest()
    assert len(found) == 4 and digest in [each[1] for each in found] and all(not each[2] for each in found)


def test_a_full_prefix_hit_computes_the_last_token():
    bench = Bench()
    bench.submit(pooled("a", 16))
    first = run(bench.core)
    bench.submit(Request("b", request("a", 16).prompt_token_ids, PREFILL, pooling=EMBED))
    assert run(bench.core)["b"] == first["a"]
    admitted = [r.event for r in bench.log.records if isinstance(r.event, ev.Admitted)][-1]
    assert admitted.num_tokens == 4 and len(admitted.cached_blocks) == 4 * 3


@pytest.mark.parametrize("log_vectors", [False, True])
def test_a_log_of_pooled_requests_verifies_and_tells_digests(tmp_path, log_vectors):
    config = settings_of(num_blocks=9, token_budget=12, max_model_len=32, log_vectors=log_vectors)
    core = EngineCore(config, SimulatedExecutor(config, check_kv=True), sink=LogWriter(tmp_path))
    asked = [pooled("a", 14), request("x", 6, max_tokens=20), pooled("b", 18, media=[image(1, 2, 4)])]
    for one in [*asked, pooled("c", 20), request("y", 3, max_tokens=20)]:
        core.submit(one)
    ends = run(core)
    core.close()
    report = verify(tmp_path, invariants=True)
    assert report.divergence is None
    assert {ends[name][0] for name in "abc"} == {"pooled"}
    events = [record.event for record in LogReader(tmp_path)]
    vectors = [entry[2] for event in events if isinstance(event, ev.Executed) for entry in event.pooled]
    expected = {np.array(ends[name][1], np.float32).tobytes() for name in "abc"}
    assert set(vectors) == (expected if log_vectors else {b""})


class _Poisoned(SimulatedExecutor):
    def collect(self):
        result = super().collect()
        result.pooled = tuple(each._replace(digest=b"") for each in result.pooled)
        return result


class _Forgetful(SimulatedExecutor):
    def collect(self):
        return msgspec.structs.replace(super().collect(), pooled=())


def test_a_vector_that_is_not_finite_fails_its_request_alone():
    bench = Bench(executor=_Poisoned(settings_of()))
    bench.submit(pooled("a", 5), request("x", 5))
    ends = run(bench.core)
    assert ends["a"][0] == "error" and ends["x"][0] == "length"
    end = next(r.event for r in bench.log.records if isinstance(r.event, ev.Finished))
    assert end.code is ErrorCode.REQUEST_FAILED and "NaN" in end.detail


def test_an_executor_without_the_vector_fails_the_step():
    bench = Bench(executor=_Forgetful(settings_of()))
    bench.submit(pooled("a", 5))
    assert run(bench.core)["a"][0] == "error"
    failed = [r.event for r in bench.log.records if isinstance(r.event, ev.Failed)]
    assert "gave no vector" in failed[0].error


def test_a_preempted_and_a_recovered_request_are_pooled_again():
    """A prompt that was half computed before a restart or a preemption gives the same vector."""
    config = settings_of(token_budget=8)
    asked = pooled("a", 20)
    whole = EngineCore(config, SimulatedExecutor(config))
    whole.submit(asked)
    expected = run(whole)
    first = EngineCore(config, SimulatedExecutor(config))
    first.submit(asked)
    first.step()
    first.step()
    state = State(config)
    for record in first.sink.records:
        evolve(state, record.event)
    second = EngineCore(config, SimulatedExecutor(config), state=state)
    second.recover(ev.Recovered())
    assert run(second) == expected
    third = EngineCore(config, SimulatedExecutor(config))
    third.submit(asked)
    third.step()
    third.reset_prefix_cache(preempt_running=True)
    assert run(third) == expected
    assert any(isinstance(record.event, ev.Preempted) for record in third.sink.records)


@pytest.mark.parametrize(
    ("sampling", "pooling"),
    [
        (SamplingParams(seed=1), EMBED),
        (PREFILL, Pooling("logits")),
        (PREFILL, Pooling("embed", (3,))),
        (PREFILL, Pooling("mean")),
        (PREFILL, Pooling("logits", (-1,))),
        (PREFILL, Pooling("logits", tuple(range(65)))),
    ],
)
def test_contradictory_pooling_is_refused(sampling, pooling):
    bench = Bench()
    with pytest.raises(InvalidRequest):
        bench.submit(Request("a", np.array([1], np.int32), sampling, pooling=pooling))


def test_random_settings_do_not_change_a_vector(tmp_path):
    """Token budgets, swapping, drafts and two steps in flight do not change a vector."""
    for seed in range(8):
        rng = random.Random(seed)
        config = small_config(rng)
        asked = [replace(small_request(rng, f"r{number}", config), group="") for number in range(6)]
        for number in (1, 3, 5):
            one = asked[number]
            asked[number] = replace(
                one, sampling=PREFILL, grammar=None, outputs=one.outputs[:0], pooling=EMBED
            )
        folder = tmp_path / str(seed)
        core = EngineCore(config, SimulatedExecutor(config, check_kv=True), sink=LogWriter(folder))
        for one in asked[: config.max_waiting]:
            core.submit(one)
        ends = run(core)
        core.close()
        assert verify(folder).divergence is None, seed
        rules = {name: getattr(config, name) for name in ("atomic_runs", "whole_prompt", "max_loras")}
        large = settings_of(num_blocks=99, max_model_len=99, token_budget=400, **rules)
        alone = EngineCore(large, SimulatedExecutor(large))
        for one in asked[1 : config.max_waiting : 2]:
            alone.submit(one)
        expected = run(alone)
        assert expected.items() <= ends.items(), seed
        assert {reason for reason, _ in expected.values()} <= {"pooled"}
