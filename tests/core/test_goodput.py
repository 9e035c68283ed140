"""How many drafts are verified follows what steps were measured to cost and how many drafts they kept."""

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mmengine.config import EngineConfig
from mmengine.core.acceptance import DRAFTERS, powers
from mmengine.core.engine import EngineCore
from mmengine.core.goodput import Goodput
from mmengine.core.simulate import CostModel, SimulatedExecutor, next_tokens, token_values
from mmengine.core.step_cost import ONE, StepCosts
from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter, MemoryLog
from mmengine.replay import verify
from mmengine.request import Request, SamplingParams

MOST = 6


class Drafting(SimulatedExecutor):
    """Proposes MOST drafts a row, of which each is right with the chance `acceptance` (by a hash of its
    place) if those before it are; drafting costs `draft_ns` each, which is known to be part of the step."""

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


def tokens_per_second(core, executor, warm_up, stop):
    """Between `warm_up` and `stop` tokens of all rows together; while all of them run."""
    while core.stats().num_output_tokens < warm_up:
        core.step()
    first, start = core.stats().num_output_tokens, executor.clock_ns
    while core.stats().num_output_tokens < stop:
        core.step()
    return (core.stats().num_output_tokens - first) * 1e9 / (executor.clock_ns - start)


def rates_of(rows, cost, acceptance, **options):
    length = 1500
    found = {}
    for policy in ("none", "all", "goodput"):
        core, executor = engine(policy, rows, cost, acceptance, length=length, **options)
        found[policy] = tokens_per_second(core, executor, rows * 400, rows * (length - 400))
    return found


def drafts_a_row(core, steps):
    """Mean drafts a row and step over the next `steps`."""
    drafts = rows = 0
    for _ in range(steps):
        core.step()
        rows += len(core.state.step_rows)
        drafts += int(core.state.scheduled_drafts[core.state.step_rows].sum())
    return drafts / max(rows, 1)


CHEAP = CostModel(step_ns=200_000, token_ns=1_000, context_ns=0)
DEAR = CostModel(step_ns=20_000, token_ns=100_000, context_ns=0)


def test_cheap_drafts_are_verified_and_dear_ones_are_not_until_that_changes():
    core, executor = engine("goodput", 4, CHEAP, 0.9, length=9000)
    core.step()
    drafts_a_row(core, 100)
    assert drafts_a_row(core, 100) > 4
    executor.set_cost(DEAR)
    drafts_a_row(core, 100)
    assert drafts_a_row(core, 200) < 0.1
    executor.set_cost(CHEAP)
    drafts_a_row(core, 400)
    assert drafts_a_row(core, 50) > 4


def test_rows_that_guess_badly_draft_less_than_rows_that_guess_well():
    cost = CostModel(step_ns=100_000, token_ns=12_000, context_ns=0)
    core, executor = engine("goodput", 8, cost, 0.95, length=2000)
    good = executor._propose

    def propose(sums, tokens, index, salts):
        drafts, counts = good(sums, tokens, index, salts)
        drafts[1::2] += 1  # never right
        return drafts, counts

    executor._propose = propose
    drafts = np.zeros(8)
    for step in range(400):
        core.step()
        if step >= 200:
            drafts += core.state.scheduled_drafts
    assert drafts[::2].min() > 200 * 2 and drafts[1::2].max() < 200 * 0.3


@given(
    rows=st.sampled_from([1, 2, 4, 16]),
    step_us=st.integers(20, 2000),
    token_us=st.integers(1, 120),
    acceptance=st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97]),
    draft_us=st.sampled_from([0, 2, 20]),
    fixed=st.sampled_from([0, 0, 10, 20]),
)
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
def test_it_gives_as_much_as_the_better_of_no_drafts_and_all(
    rows, step_us, token_us, acceptance, draft_us, fixed
):
    cost, fixed_us = CostModel(step_us * 1000, token_us * 1000, 0), step_us * fixed // 100
    rates = rates_of(rows, cost, acceptance, draft_ns=draft_us * 1000, fixed_ns=fixed_us * 1000)
    share = rates["goodput"] / max(rates["none"], rates["all"])
    print(f"{share:.3f} of the better one: {rows} rows, {step_us} + {token_us} a token, p {acceptance}, "
          f"{draft_us} a draft, {fixed_us} fixed, all / none {rates['all'] / rates['none']:.2f}")  # fmt: skip
    assert share >= 0.98


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
    assert num_drafts == {True, False}, "drafts were verified in some steps, and not in others"


def test_a_snapshot_holds_it():
    core, _ = engine("goodput", 3, CHEAP, 0.8)
    drafts_a_row(core, 60)
    there, again = core.state.goodput, Goodput(3, MOST)
    again.restore(there.saved())
    assert again.digest() == there.digest() and again.has_room == there.has_room
    rows = core.state.running
    for each in (there, again):
        each.ran(rows, 4, 6, (90_000, 100), 3, True)
    assert again.digest() == there.digest()


def test_costs_are_those_of_the_steps_that_ran():
    costs = StepCosts()
    assert costs.relative(costs.bucket(4)) is None
    for drafts in (0, 0, 0, 0, 4, 8, 2, 12, 4, 8, 2, 12):
        costs.ran(costs.bucket(4), drafts, 100_000 + (20_000 + 5_000 * drafts if drafts else 0))
    base, each = costs.relative(costs.bucket(4))
    assert abs(base - 1.2 * ONE) < 0.01 * ONE and abs(each - 0.05 * ONE) < 0.001 * ONE
    costs.made(costs.bucket(4), 10, 10_000)
    assert abs(costs.relative(costs.bucket(4))[1] - 0.06 * ONE) < 0.001 * ONE
    assert costs.plain_ns(costs.bucket(4)) == 100_000


def test_one_hiccup_decides_nothing():
    costs = StepCosts()
    for _ in range(8):
        costs.ran(costs.bucket(4), 0, 100_000)
    costs.ran(costs.bucket(4), 0, 10**12)
    assert costs.plain_ns(costs.bucket(4)) < 140_000


def test_buckets_hold_like_numbers_of_rows():
    buckets = [StepCosts.bucket(rows) for rows in range(1, 200)]
    assert buckets == sorted(buckets) and buckets[:8] == list(range(1, 9))
    assert len(set(buckets)) < 30


def test_powers_of_a_chance():
    assert powers(np.array([ONE, ONE // 2, 0]), 3).tolist() == [
        [ONE, ONE // 2, 0],
        [ONE, ONE // 4, 0],
        [ONE, ONE // 8, 0],
    ]


def test_numbers_of_drafters_from_a_log_may_be_anything():
    goodput = Goodput(2, MOST)
    goodput.judge(np.array([0, 1]), np.array([-5, 99]), np.array([2, 3]), np.array([2, 0]))
    assert goodput.acceptance.hits[0, 0] and goodput.acceptance.trials[DRAFTERS - 1, 1]


def test_settings_that_contradict_it_are_refused():
    with pytest.raises(ConfigError, match="draft_policy goodput cannot go with compat vllm"):
        EngineConfig(draft_policy="goodput", num_draft_tokens=2, compat="vllm").check()
