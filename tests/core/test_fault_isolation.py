"""Tests fault isolation: a request that makes its steps fail ends with an error, and all other requests get
their answers.
"""

import random

import pytest

from mmengine.core.engine import EngineCore
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogWriter
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import Bench, image, request, settings_of
from tests.core.workloads import check_invariants


class Killed(SimulatedExecutor):
    """Fails each step in which a request in `killers` reaches or exceeds `at` computed tokens."""

    def __init__(self, config, killers, at=0):
        super().__init__(config, check_kv=True)
        self.killers, self.at, self.names, self.steps = killers, at, {}, []

    def collect(self):
        plan = self._plan if not hasattr(self, "_plans") else self._plans[0]
        self.names.update({one.row: one.request.request_id for one in plan.admitted})
        names = [self.names[row] for row in plan.rows.tolist()]
        reached = dict(zip(names, (plan.num_computed + plan.num_scheduled).tolist()))
        result = super().collect()
        killer = [name for name in names if name in self.killers and reached[name] >= self.at]
        self.steps.append((names, bool(killer)))
        if killer:
            raise ExecutorFailed(f"killed by {killer[0]}")
        return result


def run(config, requests, killers, folder, at=0):
    executor = Killed(config, killers, at)
    core = EngineCore(config, executor, sink=LogWriter(folder))
    for one in requests:
        core.submit(one)
    tokens, ends = {}, {}
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason, output.detail
        check_invariants(core.state)
    core.close()
    report = verify(folder)
    assert report.ok and not report.unfinished, report.divergence
    assert not core.state.suspects
    return executor, tokens, ends


def check_innocents(requests, killers, config, tokens, ends):
    for one in requests:
        name = one.request_id
        if name in killers:
            assert ends[name] == ("error", f"killed by {name}")
        else:
            assert (tokens[name], ends[name][0]) == reference_tokens(one, config)


@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_killer_among_sixteen(tmp_path, at, in_flight):
    config = settings_of(max_num_seqs=16, num_blocks=257, token_budget=256, max_in_flight=in_flight)
    requests = [request(f"r{k:02}", 10 + k % 3, max_tokens=14) for k in range(16)]
    executor, tokens, ends = run(config, requests, {"r09"}, tmp_path / "log", at)
    check_innocents(requests, {"r09"}, config, tokens, ends)
    failed = [names for names, failed in executor.steps if failed]
    assert len(failed) <= 6, "steps with 16, 8, 4, 2 and 1 rows fail, and at most one more"
    assert failed[-1] == ["r09"]


@pytest.mark.parametrize("seed", range(30))
def test_killers_in_a_small_pool(seed, tmp_path):
    rng = random.Random(seed)
    config = settings_of(
        max_num_seqs=rng.choice([2, 5, 8]),
        num_blocks=rng.choice([17, 25]),
        token_budget=rng.choice([8, 20]),
        max_in_flight=rng.choice([1, 2]),
        policy=rng.choice(["fcfs", "priority", "prefill_first"]),
        swap_blocks=rng.choice([0, 12]),
        encoder_cache_size=12,
        encoder_budget=8,
        max_retries=rng.choice([1, 2]),
    )
    requests = []
    for k in range(14):
        media = [image(k % 3, 1, 5)] if rng.random() < 0.4 else []
        prompt = [1, 2, 3, 4, *range(rng.randint(3, 25))] if rng.random() < 0.5 else rng.randint(8, 30)
        fields = {"group": f"r{k - 1:02}"} if k and rng.random() < 0.2 else {}
        one = request(
            f"r{k:02}", prompt, max_tokens=rng.randint(1, 20), media=media, priority=k % 2, **fields
        )
        requests.append(one)
    killers = {f"r{rng.randrange(14):02}" for _ in range(rng.randint(0, 3))}
    executor, tokens, ends = run(config, requests, killers, tmp_path / "log", 0)
    check_innocents(requests, killers, config, tokens, ends)


def test_a_single_failure_costs_two_steps_and_no_request(tmp_path):
    hiccups = iter([3])
    config_steps = {next(hiccups)}
    bench = Bench(
        max_num_seqs=8, fault=lambda step: "planted" if step in config_steps else None, max_retries=1
    )
    requests = [request(f"r{k}", 5, max_tokens=6) for k in range(8)]
    bench.submit(*requests)
    events = bench.run()
    assert {end for end, _ in bench.ends.values()} == {"length"}
    rows = [len(event.rows or b"") // 4 for event in events if isinstance(event, ev.Scheduled)]
    assert sum(isinstance(event, ev.Failed) for event in events) == 1
    admitted = [event.request_id for event in events if isinstance(event, ev.Admitted)]
    assert len(admitted) == 16 and rows, "each request was admitted twice"
    for one in requests:
        assert bench.tokens[one.request_id] == reference_tokens(one, bench.config)[0]


def test_requests_outside_the_failed_step_wait_for_the_trials(tmp_path):
    bench = Bench(max_num_seqs=4, fault=lambda step: "planted" if step == 1 else None)
    bench.submit(request("a", 5, max_tokens=8), request("b", 5, max_tokens=8))
    bench.step()
    bench.step()
    bench.submit(request("c", 5, max_tokens=2))
    started = [event for event in bench.run() if isinstance(event, (ev.Admitted, ev.Failed))]
    names = [getattr(event, "request_id", "failed") for event in started]
    assert names == ["failed", "a", "b", "c"]
    assert all(end == "length" for end, _ in bench.ends.values())
