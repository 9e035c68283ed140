"""Tests the choice of draft levels on a simulated machine: which level is chosen, how soon, and how much time
the trials cost. At draft level n, drafters 0 to n draft.
"""

import random

import numpy as np
import pytest
from drafting_machine import MOST, Drafter, Machine
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mmengine.core.state.draft_arbiter import NO_DRAFTERS
from mmengine.core.state.draft_trials import LATEST

RUN = 1000  # steps
HEAD = Drafter(0.95, 60, 8)


def shares(drafters, run, **costs):
    """Return (share, times). `times`: the time per token with goodput, without drafts, and with each draft
    level. `share`: goodput's time, divided by the smallest other time.
    """
    found = []
    for policy in ("goodput", "none", *range(len(drafters))):
        machine = Machine(policy, drafters, **costs)
        run(machine)
        found.append(machine.ns_a_token)
    return found[0] / min(found[1:]), found


@pytest.mark.long
@given(
    rows=st.sampled_from([1, 2, 4, 16, 64]),
    step_us=st.integers(50, 1000),
    row_us=st.integers(2, 40),
    token_share=st.sampled_from([0.05, 0.3, 0.6, 1.0, 1.3]),
    chance=st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.97]),
    fixed_us=st.integers(0, 100),
    draft_us=st.integers(0, 20),
    noise=st.sampled_from([0.0, 0.1, 0.3]),
)
@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
def test_it_loses_little_against_the_best_fixed_choice(
    rows, step_us, row_us, token_share, chance, fixed_us, draft_us, noise
):
    """A run takes at most 12 % longer than with the best fixed level, plus the time for 16 to 56 steps with
    all drafts.
    """
    drafters = [Drafter(chance, fixed_us, draft_us)]
    costs = {"step_us": step_us, "row_us": row_us, "token_us": row_us * token_share, "noise": noise}
    share, found = shares(drafters, lambda machine: machine.run(rows, RUN), **costs)
    print(f"{share:.3f}, none / all {found[1] / found[2]:.2f}: {rows} rows, {costs}, {chance}, {drafters}")
    step = step_us + row_us * rows
    drafted = step + (row_us * token_share + draft_us) * MOST * rows + fixed_us
    assert share < 1.12 + (16 + 40 // rows) * drafted / step / RUN


@pytest.mark.long
def test_drafts_lose_at_most_the_cost_of_finding_out():
    """With goodput, random machines are at least 98 % as fast as without drafts, including all trials. Where
    drafters must read the tokens that they missed, it is 95 %: the policy learns this cost only by trials.
    """
    rng, found = random.Random(1), []
    for number in range(24):
        rows, row_us = (1, 4, 16, 64)[number % 4], rng.randint(2, 40)
        costs = {
            "step_us": rng.randint(50, 1000),
            "row_us": row_us,
            "token_us": row_us * rng.choice((0.05, 0.3, 0.6, 1.0, 1.3)),
            "noise": rng.choice((0, 0.1, 0.3)),
            "missed_us": rng.choice((0, 1, 3)),
        }
        drafters = [
            Drafter(
                rng.choice((0, 0.3, 0.5, 0.8, 0.9, 0.97)),
                rng.randint(0, 100),
                rng.randint(0, 20),
                has_some=rng.choice((1, 1, 0.5, 0.1, 0)),
            )
            for _ in range(rng.choice((1, 1, 2)))
        ]
        machine, length = Machine("goodput", drafters, **costs), rng.choice((20, 100, 1500))
        for _ in range(1500 // length):
            machine.admit(*range(rows))
            machine.run(rows, length)
        without = (machine.step_us + machine.row_us * rows) / rows
        found.append(without * machine.tokens / machine.work_us)
        assert found[-1] >= (0.95 if machine.missed_us else 0.98)
    print(sorted(found))
    assert sum(ratio > 1.1 for ratio in found) >= 4, "drafts that save time are used"


@pytest.mark.parametrize("rows, pays", [(1, True), (4, True), (16, True), (64, False)])
def test_it_knows_soon(rows, pays):
    """With the costs of a small model on a CPU, drafts save time with few rows, but not with 64 rows."""
    machine = Machine("goodput", [HEAD], row_us=17, token_us=8 if rows < 64 else 40, noise=0.1)
    machine.run(rows, 40)
    assert machine.run(rows, 200) == pytest.approx(float(pays), abs=0.15)


def test_each_number_of_rows_is_decided_by_itself():
    """The batch shrinks from 64 rows. Drafts save time with eight rows, but not with 64."""
    costs = {"row_us": 17, "token_us": 20, "noise": 0.1}

    def drain(machine):
        for _ in range(12):
            machine.admit(*range(64))
            for rows in range(64, 0, -1):
                end = machine.tokens + 4 * rows
                while machine.tokens < end:
                    machine.run(rows, 1)

    share, found = shares([HEAD], drain, **costs)
    print(f"{share:.3f} {found}")
    assert share < 1.4, "the trials take so much time, because there are trials for each number of rows"
    machine = Machine("goodput", [HEAD], **costs)
    for _ in range(3):
        drain(machine)
    ns, tokens = machine.ns, machine.tokens
    drain(machine)
    print((machine.ns - ns) / (machine.tokens - tokens) / found[1])
    assert (machine.ns - ns) / (machine.tokens - tokens) < 1.2 * found[1]
    machine.admit(*range(64))
    assert machine.run(64, 60) < 0.3
    machine.admit(0, 1)
    machine.run(2, 40)
    assert machine.run(2, 60) > 0.5


def test_a_large_batchs_loss_does_not_count_for_its_last_rows():
    machine = Machine("goodput", [HEAD], row_us=17, token_us=40, noise=0.3)
    for _ in range(8):
        machine.admit(*range(64))
        for rows in (64, 48, 24, 12, 6, 3, 1):
            machine.run(rows, 5)
    assert machine.goodput.waits and all(bucket > 16 for bucket in machine.goodput.waits)
    machine.admit(0)
    machine.run(1, 40)
    assert machine.run(1, 60) > 0.8


def test_drafters_are_measured_separately():
    """The first drafter's drafts cost no time and are always accepted. The second drafter takes too long."""
    costs = {"row_us": 30, "token_us": 12, "noise": 0.1}
    drafters = [Drafter(1.0, most=2, has_some=0.5), Drafter(0.9, 400, 40)]
    share, found = shares(drafters, lambda machine: machine.run(16, RUN), **costs)
    print(f"{share:.3f} {found}")
    assert found[2] < 0.9 * found[1] < 0.9 * found[3], "only the first drafter is best"
    assert share < 1.1, "the trials take the rest of the time"
    machine = Machine("goodput", drafters, **costs)
    machine.run(16, 300)
    assert machine.goodput.level == 0
    machine.run(2, 20)  # with two rows all drafters draft
    machine.admit(*range(16))
    room = machine.goodput.draft_limits_of(np.arange(16))
    assert room[0].any() and not room[1:].any()


def test_a_drafter_without_drafts_does_not_slow_steps():
    for token_us, pays in ((5, True), (100, False)):
        machine = Machine("goodput", [Drafter(1.0, has_some=0.0), HEAD], token_us=token_us, noise=0.1)
        machine.run(8, 60)
        assert machine.run(8, 200) == pytest.approx(float(pays), abs=0.15)
        assert (machine.drafts_a_row > 4) == pays


def test_while_drafts_do_not_pay_trying_takes_little():
    machine = Machine("goodput", [Drafter(0.1, 60, 8)], missed_us=2)
    machine.run(4, 200)
    ns, tokens = machine.ns, machine.tokens
    for row in range(400):
        machine.admit(row % 4)
        machine.run(4, 50)
    plain = Machine("none", [HEAD])
    plain.run(4, 10)
    assert (machine.ns - ns) / (machine.tokens - tokens) < 1.02 * plain.ns_a_token


@pytest.mark.parametrize("rows", [1, 16])
def test_prompts_of_short_answers_are_not_read_for_drafts(rows):
    """With six output tokens, drafts save less time than the drafter needs for the prompt. With a hundred,
    they save more.
    """
    costs, reading_us = {"row_us": 10, "token_us": 5, "noise": 0.1}, 1000 + 300 * rows
    machine = Machine("goodput", [Drafter(0.95, 60, 1)], **costs)
    read = [machine.answer(rows, 6, reading_us) for _ in range(200)]
    assert 0 < sum(read) < len(read) // 3
    plain = Machine("none", [Drafter(0.95, 60, 1)], **costs)
    plain.answer(rows, 6, reading_us)
    assert machine.work_us / machine.tokens < plain.work_us / plain.tokens / 0.98
    read = [machine.answer(rows, 100, reading_us) for _ in range(60)]
    assert sum(read[-20:]) >= 15, "prompts are read except while drafts rest"


def test_requests_that_are_easy_to_guess_are_drafted_for_again():
    machine = Machine("goodput", [Drafter(0.1, 60, 8)], noise=0.1)
    machine.run(4, 300)
    assert machine.goodput.level == NO_DRAFTERS
    machine.drafters = [HEAD]
    for row in range(40):
        machine.admit(row % 4)
        machine.run(4, 40)
    assert machine.run(4, 100) > 0.9


def test_drafts_that_never_paid_are_tried_again_later():
    machine = Machine("goodput", [HEAD], token_us=100)
    assert machine.run(8, 200) < 0.2
    machine.token_us = 1
    machine.run(8, LATEST + 200)
    assert machine.run(8, 100) > 0.9


def test_drafts_that_cost_more_from_now_on_are_off_soon():
    machine = Machine("goodput", [HEAD], token_us=1, noise=0.1)
    assert machine.run(8, 200) > 0.9
    machine.token_us = 100
    machine.run(8, 60)
    assert machine.run(8, 200) < 0.05
