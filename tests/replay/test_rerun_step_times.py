"""Tests the step times of a what-if simulation: fitting them to a log, and drawing times."""

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmengine.events import vocabulary as ev
from mmengine.replay.rerun import simulation
from mmengine.replay.rerun.calibration import (
    MAX_SLICES,
    MIN_REQUESTS,
    Calibration,
    HeldOut,
    _halves,
    slices_of,
)
from mmengine.replay.rerun.fit import StepWork
from mmengine.replay.rerun.resampling import DrawnTimes
from mmengine.replay.rerun.script import Observation
from mmengine.replay.rerun.simulation import _arriving
from mmengine.replay.rerun.step_times import BEFORE, DURING, PLAIN, TimedStep, fit_times

DECODE, PROMPT = 0, 1
NS = {DECODE: 600_000, PROMPT: 4_000_000}


def work_of(kind, rows, tokens):
    return StepWork(np.array([1, tokens, rows, 50 * rows, 50 * tokens, rows, 0], np.float64), kind, rows)


def steps_of(rng, count, *, slow_from=2.0, arrival_ns=0, pause_share=0.0):
    """Return a log's steps. `slow_from`: after this share of the log, steps take twice as long. `arrival_ns`:
    the time that an arrival adds to its own step and to the preceding step. `pause_share`: share of steps
    with a pause of 20 ms.
    """
    steps, now, follows = [], 0, False
    for number in range(count):
        kind, rows = int(rng.random() < 0.1), int(rng.integers(1, 9))
        arrives, is_late = follows, number >= slow_from * count
        follows = rng.random() < 0.05
        own_ns = (NS[kind] + 30_000 * rows) * rng.lognormal(0, 0.1) * (1 + is_late)
        own_ns += (arrives + follows) * arrival_ns
        pause_ns = 20_000_000 * (rng.random() < pause_share)
        now += round(own_ns + pause_ns)
        work = work_of(kind, rows, 100 if kind else rows)
        is_first = number % 97 == 0
        steps.append(
            TimedStep(work, round(0.7 * own_ns), round(0.3 * own_ns), now, pause_ns, is_first, arrives)
        )
    return steps


def time_of(step):
    return step.device_ns + step.host_ns + step.pause_ns


def draw(steps, times, seed=0):
    """Return a drawn time for each step's work."""
    drawn, found = DrawnTimes(times, np.random.default_rng(seed), overlaps=False), []
    for step in steps:
        if step.is_first:
            drawn.begin()
        found.append(drawn.step_ns(step.work, step.end_ns))
    return np.array(found)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pause_share=st.sampled_from((0.0, 0.02, 0.1)))
def test_drawn_times_are_spread_like_the_logged_times(seed, pause_share):
    steps = steps_of(np.random.default_rng(seed), 3000, pause_share=pause_share)
    logged = np.array([time_of(step) for step in steps])
    found = draw(steps, fit_times(steps, overlaps=False), seed)
    assert found.mean() == pytest.approx(logged.mean(), rel=0.12)
    assert np.median(found) == pytest.approx(np.median(logged), rel=0.05)
    is_pause = found > 15e6
    assert is_pause.mean() == pytest.approx(pause_share, abs=0.03)
    # A pause is as long as in the log; the step's slowness does not scale it.
    assert not is_pause.any() or found.max() < 20e6 + 2 * NS[PROMPT]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_drift_of_the_speed_is_followed(seed):
    steps = steps_of(np.random.default_rng(seed), 2000, slow_from=0.5)
    times = fit_times(steps, overlaps=False)
    for part in (steps[:500], steps[-500:]):
        assert draw(part, times).mean() == pytest.approx(np.mean([time_of(step) for step in part]), rel=0.1)


def test_an_arrival_delays_the_step_and_the_step_before():
    steps = steps_of(np.random.default_rng(1), 4000, arrival_ns=3_000_000)
    times = fit_times(steps, overlaps=False)
    for phase in (DURING, BEFORE):
        for kind in (DECODE, PROMPT):
            assert np.median(times.delays_ns[phase, kind]) == pytest.approx(3e6, rel=0.1)
    found = draw(steps, times)
    plain = np.array([time_of(step) for step in steps])[times.is_plain]
    assert np.median(found) == pytest.approx(np.median(plain), rel=0.05), "delays belong to no drawn step"
    drawn = DrawnTimes(times, np.random.default_rng(0), overlaps=False)
    assert drawn.phase(1_000_000, 999_999) == DURING
    assert drawn.phase(1_000_000, 1_000_000) == BEFORE
    assert drawn.phase(1_000_000, 1_000_000 + round(times.lead_ns) + 1) == PLAIN
    assert drawn.delay_ns(PLAIN) == 0
    for phase in (DURING, BEFORE):
        found = []
        for step in steps[:2000]:
            drawn.step_ns(step.work, step.end_ns)
            found.append(drawn.delay_ns(phase))
        assert np.mean(found) == pytest.approx(3e6, rel=0.1)


@pytest.mark.parametrize("slow_from", [2.0, 0.0])
def test_delayed_steps_are_spread_like_the_logged_ones(slow_from):
    """A delayed step's time varies like a logged step's time."""
    steps = steps_of(np.random.default_rng(1), 4000, slow_from=slow_from, arrival_ns=500_000)
    times = fit_times(steps, overlaps=False)
    drawn = DrawnTimes(times, np.random.default_rng(0), overlaps=False)
    found, logged = [], []
    for step in steps:
        time_ns = drawn.step_ns(step.work, step.end_ns)
        if step.has_arrival and step.work.kind == PROMPT:
            found.append(time_ns + drawn.delay_ns(DURING))
            logged.append(time_of(step))
    assert np.mean(found) == pytest.approx(np.mean(logged), rel=0.05)
    assert np.std(found) == pytest.approx(np.std(logged), rel=0.25)


def test_a_request_may_arrive_in_the_time_by_which_it_delays_a_step(monkeypatch):
    """A step takes 0.7 ms, or 3.7 ms with an arrival's delay. An arrival at 2 ms falls into the delayed step,
    and an arrival at 8 ms does not.
    """
    times = fit_times(steps_of(np.random.default_rng(1), 4000, arrival_ns=3_000_000), overlaps=False)
    during = {key: delays for key, delays in times.delays_ns.items() if key[0] == DURING}
    drawn = DrawnTimes(replace(times, delays_ns=during), np.random.default_rng(0), overlaps=False)
    monkeypatch.setattr(simulation, "work_of_plan", lambda plan, num_embeds: work_of(DECODE, 4, 4))
    for arrival_ns, expected_ns in ((2_000_000, 3.7e6), (8_000_000, 0.7e6)):
        prices = simulation._Prices(drawn, [arrival_ns])
        prices.timer = SimpleNamespace(now=lambda: 0)
        assert np.median([prices.price(None, 0) for _ in range(300)]) == pytest.approx(expected_ns, rel=0.1)


def test_delays_are_not_longer_because_long_steps_get_arrivals(monkeypatch):
    """Random arrivals fall into long steps more often, in the log and in the simulation. The simulation must
    not count this effect twice.
    """
    rng, steps, now, arrivals = np.random.default_rng(6), [], 0, []
    next_ns = 0
    for _ in range(6000):
        own_ns = NS[DECODE] * (1 + 9 * (rng.random() < 0.3))
        has_arrival = next_ns < now + own_ns
        if has_arrival:
            arrivals.append(next_ns)
            next_ns = now + own_ns + rng.exponential(20 * NS[DECODE])
        now += round(own_ns)
        steps.append(TimedStep(work_of(DECODE, 4, 4), round(own_ns), 0, now, has_arrival=has_arrival))
    logged = np.mean([time_of(step) for step in steps if step.has_arrival])
    times = fit_times(steps, overlaps=False)
    during = {key: delays for key, delays in times.delays_ns.items() if key[0] == DURING}
    drawn = DrawnTimes(replace(times, delays_ns=during), np.random.default_rng(0), overlaps=False)
    monkeypatch.setattr(simulation, "work_of_plan", lambda plan, num_embeds: work_of(DECODE, 4, 4))
    prices, now, found = simulation._Prices(drawn, [round(each) for each in arrivals]), 0, []
    prices.timer = SimpleNamespace(now=lambda: now)
    while now < arrivals[-1]:
        step_ns = prices.price(None, 0)
        if bisect_left(arrivals, now) < bisect_left(arrivals, now + step_ns):
            found.append(step_ns)
        now += step_ns
    assert np.mean(found) == pytest.approx(logged, rel=0.1)


def test_a_request_delays_one_step_before_its_arrival(monkeypatch):
    times = fit_times(steps_of(np.random.default_rng(1), 4000, arrival_ns=3_000_000), overlaps=False)
    before = {key: delays for key, delays in times.delays_ns.items() if key[0] == BEFORE}
    times = replace(times, delays_ns=before, lead_ns=12e6)
    drawn = DrawnTimes(times, np.random.default_rng(0), overlaps=False)
    monkeypatch.setattr(simulation, "work_of_plan", lambda plan, num_embeds: work_of(DECODE, 4, 4))
    counts = []
    for _ in range(50):
        prices, taken = simulation._Prices(drawn, [20_000_000]), [0]
        prices.timer = SimpleNamespace(now=partial(sum, taken))
        while sum(taken) < 20_000_000:
            taken.append(prices.price(None, 0))
        counts.append(sum(each > 2_500_000 for each in taken))
    assert 0.9 < np.mean(counts) < 1.3


def episodes_of(rng, count, length):
    """Return a log's steps, twice as slow in every second episode of `length` steps."""
    steps, now = [], 0
    for number in range(count):
        own_ns = NS[DECODE] * rng.lognormal(0, 0.1) * (1 + number // length % 2)
        now += round(own_ns)
        steps.append(TimedStep(work_of(DECODE, 4, 4), round(own_ns), 0, now))
    return steps


@pytest.mark.parametrize("length", [100, 500])
def test_slow_episodes_stay_episodes(length):
    """An idle time does not end a slow episode."""
    steps = episodes_of(np.random.default_rng(3), 8000, length)
    drawn = DrawnTimes(fit_times(steps, overlaps=False), np.random.default_rng(0), overlaps=False)
    now, times = 0, []
    for number, step in enumerate(steps):
        if number % 10 == 0:
            drawn.begin()
        times.append(drawn.step_ns(step.work, now))
        now += times[-1]
    sums = np.array(times).reshape(-1, length // 2).sum(axis=1)
    logged = np.array([time_of(step) for step in steps]).reshape(-1, length // 2).sum(axis=1)
    assert sums.std() > 0.7 * logged.std()
    assert sums.mean() == pytest.approx(logged.mean(), rel=0.1)


def test_the_slowness_is_the_logs_at_this_time():
    """As in the calibration, the times are fitted to every second slice. With any seed, the drawn times add
    up to the log's total. A slow episode is neither repeated nor left out.
    """
    steps = episodes_of(np.random.default_rng(4), 8400, 600)
    half = [step for number, step in enumerate(steps) if number // 70 % 2]
    times = fit_times(half, overlaps=False)
    for seed in range(4):
        drawn, now = DrawnTimes(times, np.random.default_rng(seed), overlaps=False), 0
        for step in steps:
            now += drawn.step_ns(step.work, now)
        assert now == pytest.approx(steps[-1].end_ns, rel=0.02)


def test_few_arrivals_have_no_delay():
    steps = steps_of(np.random.default_rng(1), 100, arrival_ns=3_000_000)
    times = fit_times(steps, overlaps=False)
    assert times.is_plain.all() and not times.delays_ns and not times.lead_ns


def test_work_that_the_log_lacks_is_priced_by_similar_steps():
    steps = steps_of(np.random.default_rng(2), 500)
    times = fit_times(steps, overlaps=False)
    drawn = DrawnTimes(times, np.random.default_rng(0), overlaps=False)
    large = work_of(PROMPT, 8, 1000)
    for _ in range(50):
        fitted = times.cost.device_ns(large) + times.cost.host_ns(8)
        assert 0.5 < drawn.step_ns(large, 0) / fitted < 2.0


@given(count=st.integers(2 * MIN_REQUESTS, 5000))
def test_slices_are_equal_and_not_small(count):
    sizes = np.bincount(slices_of(count))
    assert len(sizes) % 2 == 0 and 2 <= len(sizes) <= MAX_SLICES
    assert sizes.min() >= MIN_REQUESTS and sizes.max() - sizes.min() <= 1
    assert (np.diff(slices_of(count)) >= 0).all()


@pytest.mark.parametrize("num_late", [0, 50, 4000])
def test_both_halves_have_steps_after_the_last_arrival(num_late):
    """An overloaded engine works long after the last arrival."""
    steps = [TimedStep(work_of(DECODE, 4, 4), 10**6, 0, number * 10**6) for number in range(4000 + num_late)]
    measured = SimpleNamespace(meter=SimpleNamespace(arrived_ns=np.arange(1000) * 4 * 10**6), steps=steps)
    halves = _halves(measured, slices_of(1000))
    assert sorted(halves[0] + halves[1], key=lambda step: step.end_ns) == steps
    late = [sum(step.end_ns >= 4000 * 10**6 for step in half) for half in halves]
    assert abs(late[0] - late[1]) <= 101 and abs(len(halves[0]) - len(halves[1])) <= 101


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5_000_000), st.integers(0, 9_000_000)), min_size=1),
    st.integers(0, 9),
)
def test_arrivals_move_back_within_their_slack(moves, seed):
    """An event may have occurred up to its slack before the scheduler saw the event. `moves`: (steps since
    the last event, ns since the last event, slack in ns).
    """
    observations, step, now = [], 0, 10**7
    for more, later_ns, slack_ns in moves:
        step, now = step + more, now + later_ns
        observations.append(Observation(step, step, now, ev.CacheReset(), slack_ns))
    moved = _arriving(observations, np.random.default_rng(seed))
    times = [each.time_ns for each in moved]
    assert times == sorted(times)
    for before, after in zip(observations, moved, strict=True):
        assert after.time_ns <= before.time_ns and after.event is before.event


def test_arrivals_that_were_seen_together_stay_together():
    seen = [Observation(7, 7, time, ev.CacheReset(), 5_000_000) for time in (9_000_000, 9_020_000, 9_900_000)]
    seen += [
        Observation(7, 7, 15_000_000, ev.CacheReset(), 0),
        Observation(8, 8, 15_000_000, ev.CacheReset(), 0),
    ]
    times = [each.time_ns for each in _arriving(seen, np.random.default_rng(0))]
    assert len(set(times[:3])) == 1 and times[0] < 9_000_000
    assert times[3:] == [15_000_000, 15_000_000]


def test_the_reason_names_halves_of_unequal_speed():
    row = HeldOut("odd", "ttft_ms_p99", 10.0, 30.0, 10.0)
    assert (
        "took 2.00 times as long as equal steps of the odd half" in Calibration((row,), slowdown=2.0).refusal
    )
    assert (
        "took 2.00 times as long as equal steps of the even half" in Calibration((row,), slowdown=0.5).refusal
    )
    assert "took" not in Calibration((row,), slowdown=1.05).refusal
    assert not Calibration((HeldOut("odd", "ttft_ms_p99", 10.0, 11.0, 10.0),), slowdown=2.0).refusal
