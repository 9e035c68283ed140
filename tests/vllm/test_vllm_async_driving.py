"""Compares answers under mmengine_vllm.Scheduler and under vLLM's AsyncScheduler. No model is used, because
vLLM's CPU build turns asynchronous scheduling off. `make vllm` runs these tests with two versions of vLLM.
"""

import random

import pytest

pytest.importorskip("vllm.version")  # `import vllm` could import the folder tests/vllm instead

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from mmengine.errors import ConfigError
from mmengine.replay import verify
from mmengine_vllm import Scheduler
from tests.vllm.fake_workers import EOS, Workers, answer
from tests.vllm.model_free import block_hasher, engine_config, make_request, make_scheduler

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
NUM_REQUESTS, MAX_LEN = 200, 512
SETTINGS = {
    "plain": {},
    "priority": {"scheduling_policy": "priority"},
    "no prefix cache": {"enable_prefix_caching": False},
    "threshold 24": {"long_prefill_token_threshold": 24},
}


def run(cls, settings):
    """Run requests, and schedule each step before `update_from_output` gets the previous step's result.
    Return the requests, their tokens, and the number of preemptions.
    """
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": MAX_LEN, "num_blocks": 40}
    config = engine_config(block_size=16, **limits, **settings)
    config.scheduler_config.async_scheduling = True
    scheduler, workers, hasher = make_scheduler(cls, config), Workers(16), block_hasher(config)
    draw, waiting = random.Random(5), []
    for number in range(NUM_REQUESTS):
        prompt = [draw.randrange(3)] * draw.randint(1, 60) + draw.choices(range(1000), k=draw.randint(1, 60))
        more = {"priority": draw.randrange(3)} if "scheduling_policy" in settings else {}
        waiting.append(make_request(f"r{number}", prompt, draw.randint(2, 90), hasher, **more))
        waiting[-1].sampling_params.stop_token_ids = [EOS]
    requests, got, flying = list(waiting), {each.request_id: [] for each in waiting}, []
    step = preempted = 0
    while waiting or flying or scheduler.has_requests():
        for _ in range(draw.randrange(3)):
            if waiting:
                scheduler.add_request(waiting.pop(0))
        if step % 40 == 30 and (names := sorted(workers.requests.keys() & scheduler.requests.keys())):
            scheduler.finish_requests(names[:1], RequestStatus.FINISHED_ABORTED)
            got.pop(names[0], None)
        output = scheduler.schedule()
        preempted += len(output.preempted_req_ids or ())
        flying.append((output, _result(workers.run(output))))
        while len(flying) > 1 or flying and not flying[0][0].total_num_scheduled_tokens:
            for of_client in scheduler.update_from_output(*flying.pop(0)).values():
                for each in of_client.outputs:
                    if each.request_id in got:
                        got[each.request_id] += each.new_token_ids
        step += 1
        assert step < 5000
    scheduler.shutdown()
    return requests, got, preempted


def _result(told):
    return ModelRunnerOutput(
        req_ids=told.req_ids,
        req_id_to_index=told.req_id_to_index,
        sampled_token_ids=told.sampled_token_ids,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_vllms_asynchronous_scheduler(tmp_path, monkeypatch, name):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    requests, theirs, preempted = run(AsyncScheduler, SETTINGS[name])
    _, ours, own_preempted = run(Scheduler, SETTINGS[name])
    common = theirs.keys() & ours.keys()
    right = {each.request_id: answer(each, MAX_LEN) for each in requests if each.request_id in common}
    equal = sum(theirs[key] == ours[key] == right[key] for key in common)
    print(
        f"\nasynchronous, {name}: {equal} of {len(common)} answers equal, "
        f"{preempted} preemptions by vLLM and {own_preempted} by mmengine"
    )
    assert equal == len(common) > NUM_REQUESTS / 2
    assert preempted and own_preempted
    assert verify(tmp_path / "log", invariants=True).divergence is None


def test_vllms_rules_are_refused_with_asynchronous_scheduling(tmp_path, monkeypatch):
    monkeypatch.setenv("MMENGINE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("MMENGINE_COMPAT", "vllm")
    with pytest.raises(ConfigError, match="max_in_flight 2 cannot go with compat vllm"):
        run(Scheduler, next(iter(SETTINGS.values())))
