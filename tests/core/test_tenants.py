"""Tests the order of waiting requests of several tenants: priority, then deficit round robin by tokens, then
arrival."""

import random
from collections import Counter

import pytest

from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.events.writer import LogWriter
from mmengine.replay.verify import verify
from mmengine.request import GrammarRequest
from tests.core.small_engine import Bench, request


def admitted(events):
    return [event.request_id for event in events if isinstance(event, ev.Admitted)]


def flood(bench, count, *, tenant, **fields):
    names = [f"{tenant}{number}" for number in range(count)]
    bench.submit(*(request(name, 4, tenant=tenant, **fields) for name in names))


def num_steps_to_first_token(bench, name):
    for number in range(10_000):
        if name in bench.tokens:
            return number
        bench.step()
    raise AssertionError(f"{name} was starved")


def test_a_flood_of_one_tenant_does_not_starve_another():
    steps = {}
    for count in (8, 600):
        bench = Bench(max_num_seqs=8, max_waiting=1000, num_blocks=257)
        flood(bench, count, tenant="flood", max_tokens=16)
        bench.step()
        bench.submit(request("other", 4, tenant="other"))
        steps[count] = num_steps_to_first_token(bench, "other")
    assert steps[600] <= 2 * steps[8]
    assert len(bench.state.waiting) > 500  # most requests of the flood still wait


def test_without_tenants_the_order_is_that_of_arrival():
    bench = Bench(max_num_seqs=2)
    flood(bench, 6, tenant="")
    bench.submit(request("last", 4))
    assert admitted(bench.run()) == [*(str(n) for n in range(6)), "last"]


def test_compat_ignores_tenants():
    bench = Bench(max_num_seqs=1, compat="vllm")
    flood(bench, 4, tenant="flood")
    bench.submit(request("other", 4, tenant="other"))
    assert admitted(bench.run())[-1] == "other"


def test_priority_comes_before_fairness_and_fairness_before_arrival():
    bench = Bench(max_num_seqs=1, policy="priority")
    flood(bench, 3, tenant="a", priority=0)
    flood(bench, 2, tenant="b", priority=1)
    flood(bench, 2, tenant="c", priority=0)
    order = admitted(bench.run())
    assert [name[0] for name in order] == ["a", "c", "a", "c", "a", "b", "b"]
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2"]


def test_a_request_that_cannot_start_does_not_hold_back_other_tenants():
    bench = Bench(max_num_seqs=1)
    waits = request("a0", 4, tenant="a", grammar=GrammarRequest("regex", "a"))
    bench.submit(waits, request("b0", 4, tenant="b"), request("a1", 4, tenant="a"))
    assert admitted([event for _ in range(12) for event in bench.step()]) == ["a1", "b0"]


def test_fairness_preempts_nothing():
    bench = Bench(max_num_seqs=2)
    flood(bench, 6, tenant="flood", max_tokens=12)
    bench.step()
    bench.submit(request("other", 4, tenant="other"))
    assert not [event for event in bench.run() if isinstance(event, ev.Preempted)]


@pytest.mark.parametrize("seed", range(6))
def test_tenants_that_wait_are_served_equally(seed):
    """While both tenants have waiting requests, nearly the same number of tokens is computed for both. The
    difference is at most 20 tokens, the longest request's length, for each row and for one more request.
    """
    rng = random.Random(seed)
    rows = rng.randint(1, 6)
    bench = Bench(max_num_seqs=rows, max_waiting=1000, num_blocks=257, max_in_flight=rng.choice([1, 2]))
    for number in range(60):
        for tenant in "ab":
            length, most = (rng.randint(1, 8), rng.randint(1, 8)) if tenant == "a" else (4, 16)
            name = f"{tenant}{number}"
            bench.submit(request(name, length, tenant=tenant, max_tokens=most))
    bench.step()
    served = Counter()
    tenants = bench.state.tenants
    while all(tenant.waiting for tenant in tenants.all.values()) and len(tenants.all) == 2:
        served = {name: int(tenants.debts[tenant.number]) for name, tenant in tenants.all.items()}
        assert abs(served["a"] - served["b"]) <= 20 * rows + 20
        bench.step()
    assert min(served.values()) > 200


@pytest.mark.parametrize("seed", range(4))
def test_logs_with_tenants_verify_and_restore(seed, tmp_path):
    rng = random.Random(seed)
    policy = rng.choice(["fcfs", "priority"])
    sink = LogWriter(tmp_path / "log")
    bench = Bench(sink=sink, max_num_seqs=3, policy=policy, num_blocks=25, max_in_flight=1 + seed % 2)
    for number in range(40):
        fields = {"tenant": rng.choice(["", "a", "b"]), "priority": rng.randint(0, 1)}
        bench.submit(request(f"r{number}", rng.randint(1, 12), max_tokens=rng.randint(1, 20), **fields))
        bench.core.step()
    while bench.core.has_work:
        bench.core.step()
    sink.close()
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok, report.divergence
    records = list(LogReader(tmp_path / "log"))
    state, cut = State(bench.config), rng.randrange(len(records) // 3, len(records) // 2)
    restored = None
    for number, record in enumerate(records):
        evolve(state, record.event)
        if number == cut:
            restored, _ = snapshot.restore(snapshot.take(state, records[0].event, number))
        elif restored is not None:
            evolve(restored, record.event)
            assert state_digest(restored) == state_digest(state)
