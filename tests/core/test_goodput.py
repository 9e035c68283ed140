"""Tests draft_policy "goodput": measured step times and accepted drafts determine the number of drafts."""

import random

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.engine import EngineCore
from mmengine.core.state.acceptance import DRAFTERS, powers
from mmengine.core.state.draft_arbiter import ALL_DRAFTERS, NO_DRAFTERS
from mmengine.core.state.goodput import Goodput
from mmengine.core.state.step_cost import ENOUGH_PLAIN, ONE, StepCosts, rows_of
from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter, MemoryLog
from mmengine.replay import verify
from mmengine.request import Request, SamplingParams
from mmengine.simulation.simulated_executor import CostModel, SimulatedExecutor, next_tokens, token_values

MOST = 6


class Drafting(SimulatedExecutor):
    """Proposes MOST drafts for each row. A draft is accepted with probability `acceptance`, if all earlier
    drafts are accepted. A draft adds `draft_ns` to the step's time.
    """

    def __init__(self, config, cost, acceptance, draft_ns=0):
        super().__init__(config, cost=cost)
        self.acceptance, self.draft_ns, self.fixed_ns = acceptance, draft_ns, 0

    def collect(self):
        plan = self._plans[0]
        result = super().collect()
        fixed = self.fixed_ns if plan.num_drafts is not None and plan.num_drafts.any() else 0
        result.draft_ns = self.draft_ns * (0 if result.drafts is None else len(result.drafts))
        result.device_ns += result.draft_ns + fixed
        self.clock_ns += result.draft_ns + fixed
        return result

    def set_cost(self, cost):
        self._cost = cost

    def _propose(self, sums, tokens, index, salts):
        drafts = np.zeros((len(sums), self._num_draft_tokens), np.int32)
        total, token = sums, tokens
        for place in range(self._num_draft_tokens):
            total = total + token_values(token, index + place)
            token = next_tokens(total, salts, self._vocab_size)
            drafts[:, place] = token
        luck = token_values(drafts, index[:, None] + np.arange(drafts.shape[1])) >> np.uint64(40)
        wrong = (luck % np.uint64(1000)) >= np.uint64(int(1000 * self.acceptance))
        drafts += np.logical_or.accumulate(wrong, axis=1)
        return drafts, np.full(len(sums), drafts.shape[1], np.int32)


def engine(policy, rows, cost, acceptance, *, draft_ns=0, fixed_ns=0, length=400, sink=None):
    config = EngineConfig(
        encoder_cache_size=64,
        max_num_seqs=rows,
        token_budget=4096,
        max_model_len=length + 16,
        num_blocks=2 + rows * (length // 16 + 2),
        num_draft_tokens=MOST if policy != "none" else 0,
        draft_policy="goodput" if policy == "goodput" else "auto",
    )
    executor = Drafting(config, cost, acceptance, draft_ns)
    executor.fixed_ns = fixed_ns
    core = EngineCore(config, executor, sink=sink if sink is not None else MemoryLog())
    for number in range(rows):
        prompt = np.array([number, number + 1], np.int32)
        core.submit(Request(f"r{number}", prompt, SamplingParams(max_tokens=length, seed=1)))
    return core, executor


def drafts_a_row(core, steps):
    """Run the next `steps` steps and return the mean number of drafts per row and step."""
    drafts = rows = 0
    for _ in range(steps):
        core.step()
        rows += len(core.state.step_rows)
        drafts += int(core.state.scheduled_drafts[core.state.step_rows].sum())
    return drafts / max(rows, 1)


CHEAP = CostModel(step_ns=200_000, token_ns=1_000, context_ns=0)
DEAR = CostModel(step_ns=20_000, token_ns=100_000, context_ns=0)


def test_rows_that_guess_badly_draft_less_than_rows_that_guess_well():
    cost = CostModel(step_ns=100_000, token_ns=12_000, context_ns=0)
    core, executor = engine("goodput", 8, cost, 0.95, length=2000)
    good = executor._propose

    def propose(sums, tokens, index, salts):
        drafts, counts = good(sums, tokens, index, salts)
        drafts[1::2] += 1  # the drafts in every second row are wrong
        return drafts, counts

    executor._propose = propose
    drafts = np.zeros(8)
    for step in range(400):
        core.step()
        if step >= 200:
            drafts += core.state.scheduled_drafts
    assert drafts[::2].min() > 200 * 2 and drafts[1::2].max() < 200 * 0.3


def test_a_step_decided_before_drafting_counts_as_plain():
    """A step is measured as a step without drafts only if no drafter was on at the step's dispatch."""
    goodput, rows = Goodput(8, MOST), np.arange(8)
    for _ in range(2 * ENOUGH_PLAIN):
        goodput.count_step(8, False, 1000)
        goodput.record_step(rows, 0, 8, 0, 1000, True, level=NO_DRAFTERS)
    assert goodput.costs.knows_plain(StepCosts.bucket(8))
    goodput = Goodput(8, MOST)
    for _ in range(2 * ENOUGH_PLAIN):
        goodput.count_step(8, False, 1000)
        goodput.record_step(rows, 0, 8, 0, 1000, True, level=ALL_DRAFTERS)
    assert not goodput.costs.knows_plain(StepCosts.bucket(8))


def test_a_log_is_derived_again(tmp_path):
    core, executor = engine(
        "goodput", 5, CHEAP, 0.8, draft_ns=3000, length=300, sink=LogWriter(tmp_path / "log")
    )
    rng = random.Random(3)
    while core.has_work:
        executor.set_cost(CostModel(rng.randint(1, 400_000), rng.randint(1, 100_000), 0))
        core.step()
    core.close()
    report = verify(tmp_path / "log")
    assert report.ok, report.divergence
    events = [record.event for record in LogReader(tmp_path / "log")]
    num_drafts = {each.num_drafts is None for each in events if isinstance(each, ev.Scheduled)}
    assert num_drafts == {True, False}, "some steps verified drafts, and others did not"


def test_a_snapshot_holds_it():
    core, _ = engine("goodput", 3, CHEAP, 0.8)
    drafts_a_row(core, 60)
    there, again = core.state.goodput, Goodput(3, MOST)
    again.restore(there.saved())
    assert again.digest() == there.digest()
    rows = core.state.running
    for each in (there, again):
        each.record_step(rows, 4, 5, 3, 90_000, True)
    assert again.digest() == there.digest()


def costs_of(num_rows=4, took_ns=250_000, tokens=10, without_ns=100_000):
    costs, bucket = StepCosts(), StepCosts.bucket(num_rows)
    for _ in range(ENOUGH_PLAIN):
        costs.add_plain(bucket, num_rows, without_ns)
    for _ in range(4):
        costs.add_drafted(bucket, ALL_DRAFTERS, num_rows, 8, tokens, took_ns)
    return costs


def test_goodput_is_tokens_per_time_relative_to_no_drafts():
    costs = costs_of(4, 200_000, 12)
    assert costs.rate(4, ALL_DRAFTERS) == pytest.approx(1.5 * ONE, rel=0.01)
    assert costs.rate(4, 0) is None and costs.rate(5, ALL_DRAFTERS) is None
    costs.add_failure(4, 0)
    assert costs.rate(4, 0) < ONE // 100
    costs.forget_drafted(4)
    assert costs.rate(4, ALL_DRAFTERS) is None and costs.knows_plain(4)


def test_a_few_long_steps_change_no_decision():
    costs = costs_of(4, 200_000, 12)
    costs.add_drafted(4, ALL_DRAFTERS, 4, 8, 12, 10**12)
    costs.add_plain(4, 4, 10**12)
    assert costs.rate(4, ALL_DRAFTERS) == pytest.approx(1.5 * ONE, rel=0.15)


def test_a_drafts_cost_sets_the_chance_that_it_needs():
    # A step with 8 drafts took 200 us for 12 output tokens, or 16.7 us per token. The drafts added 100 us, or
    # 12.5 us each. The minimum chance of acceptance is a third of 12.5 / 16.7, because drafts share some
    # cost.
    assert costs_of(4, 200_000, 12).least_chance(4, ALL_DRAFTERS) == pytest.approx(0.25 * ONE, rel=0.02)
    assert costs_of(4, 90_000, 12).least_chance(4, ALL_DRAFTERS) == 0
    assert costs_of(4, 10**9, 4).least_chance(4, ALL_DRAFTERS) == ONE // 2
    assert StepCosts().least_chance(4, ALL_DRAFTERS) == 0


def test_of_steps_without_drafts_a_like_number_of_rows_speaks():
    # Without drafts, a step with 16 rows was measured. It counts for about half to twice as many rows.
    costs = costs_of(16)
    known = {rows: costs.knows_plain(StepCosts.bucket(rows)) for rows in (4, 8, 12, 16, 20, 32, 64)}
    assert known == {4: False, 8: True, 12: True, 16: True, 20: True, 32: True, 64: False}


def test_buckets_hold_like_numbers_of_rows():
    buckets = [StepCosts.bucket(rows) for rows in range(1, 200)]
    assert buckets == sorted(buckets) and buckets[:8] == list(range(1, 9))
    assert len(set(buckets)) < 30
    assert all(rows_of(bucket) <= rows for rows, bucket in enumerate(buckets, 1))


def test_powers_of_a_chance():
    assert powers(np.array([ONE, ONE // 2, 0]), 3).tolist() == [
        [ONE, ONE // 2, 0],
        [ONE, ONE // 4, 0],
        [ONE, ONE // 8, 0],
    ]


def test_numbers_of_drafters_from_a_log_may_be_anything():
    """Drafter indices out of range are clipped."""
    goodput = Goodput(2, MOST)
    goodput.judge(
        np.array([0, 1]), np.array([-5, 99]), np.array([2, 3]), np.array([3, 1], np.int32).tobytes()
    )
    goodput.saved()
    assert goodput.acceptance.hits[0, 0] and goodput.acceptance.trials[DRAFTERS - 1, 1]


def test_settings_that_contradict_it_are_refused():
    with pytest.raises(ConfigError, match="draft_policy goodput cannot go with compat vllm"):
        EngineConfig(draft_policy="goodput", num_draft_tokens=2, compat="vllm").check()
