"""Tests two steps in flight in simulations with drafts and grammars. Each request gets the same tokens as
without overlap and faults, and `verify` accepts the log. A step's time is the time between two results.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from simulated import whole_output, write_scenario
from test_simulation_random import random_config, random_events, random_request

from mmengine.core.executor import StepResult
from mmengine.core.resume import Resume, read_resume_state
from mmengine.events.log import LogWriter
from mmengine.replay import verify
from mmengine.simulation import Driver, read_settings
from mmengine.simulation.device import TimedExecutor
from mmengine.simulation.workload_files import load_workload


@pytest.mark.parametrize("policy", ["all", "goodput"])
@pytest.mark.parametrize("seed", range(5))
def test_random_scenarios(seed, policy, tmp_path):
    rng = random.Random(seed)
    requests = [random_request(rng, number) for number in range(14)]
    config = {**random_config(rng), "max_in_flight": 2}
    if seed % 4:
        config |= {"num_spec_tokens": 2, "spec_method": "ngram", "draft_policy": policy}
        config |= {"drafts_for": rng.choice(["all", "forms"])}
    path = write_scenario(
        tmp_path, requests, config=config, events=random_events(rng, requests), max_steps=3000
    )
    work = load_workload(path)
    settings = read_settings(work.settings, work)
    report = Driver(work, settings, log=LogWriter(tmp_path / "log")).run()
    gone = {e.request_id for e in work.events if e.op in ("abort", "grammar_error")}
    assert not report.num_refused and not set(report.unfinished) - gone
    answers = read_resume_state(tmp_path / "log", Resume(wanted=lambda name: True)).answers
    for raw in requests:
        found, (expected, reason) = answers[raw["id"]], whole_output(raw, settings.config.max_model_len)
        # A row gets no tokens from the step in which the row fails.
        if raw["id"] in gone or reason == "error":
            expected = expected[: len(found.token_ids)]
        assert found.token_ids == expected
        assert raw["id"] in gone or found.reason == reason
    how = report.stats.overlap
    assert sum(how.values()) == report.num_steps and (how["ahead"] or how["drafts"])
    verified = verify(tmp_path / "log")
    assert verified.ok and not verified.unfinished


class Steady(TimedExecutor):
    def __init__(self):
        super().__init__(SimpleNamespace(price=lambda plan, num_embeds: 100), (), lambda num_rows: 30)

    def _run(self, plan, device_ns):
        return StepResult(np.zeros(0, np.int32), device_ns=device_ns)


def test_a_step_takes_the_time_between_two_results():
    """The engine's own work adds no time while the device computes."""
    plan, executor = SimpleNamespace(admitted=(), encode=(), part=None, pool=(), rows=np.zeros(1)), Steady()
    executor.wait_until(1000)
    executor.dispatch(plan)
    assert executor.collect().host_ns == 30
    executor.dispatch(plan)
    executor.dispatch(plan)
    assert [executor.collect().host_ns, executor.collect().host_ns] == [30, 0]
