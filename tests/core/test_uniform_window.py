"""Tests models whose layers all have a sliding window: rows hold only the blocks in their window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_engine import Bench, request, settings_of
from window_checks import (
    admitted_of,
    check_planted,
    check_windows,
    held,
    most_held,
    random_states,
    restored_states,
    run_chaos,
    seeds_with,
)
from workloads import with_uniform_window

from mmengine.block_groups import BlockGroup, longest_row, most_blocks
from mmengine.core.decide import start
from mmengine.core.fold import uniform_window
from mmengine.errors import ConfigError
from mmengine.replay import verify
from mmengine.replay.block_invariants import broken_windows
from mmengine.simulation.simulated_executor import reference_tokens

GROUPS = (BlockGroup(6, (0, 1)),)
PROMPT = list(range(500, 580))


@pytest.mark.parametrize("seed", seeds_with(with_uniform_window, 8))
def test_each_key_in_the_window_is_present_despite_faults(seed, tmp_path):
    check_windows(seed, tmp_path / "log", with_uniform_window)


@pytest.mark.soak
def test_each_key_in_the_window_is_present_despite_faults_in_the_long_run(tmp_path):
    for seed in seeds_with(with_uniform_window, 120)[8:]:
        check_windows(seed, tmp_path / str(seed), with_uniform_window)


needed = uniform_window.first_needed


def hits_without_last(config, num_computed):
    """Return the number of skipped blocks, plus 1 as a planted bug if any tokens are computed."""
    return int(needed(config, num_computed)) + bool(num_computed)


PLANTED = {
    "blocks are released too early": (
        (uniform_window, "first_needed", lambda config, computed: needed(config, computed + 4)),
    ),
    "blocks are never released": (
        (uniform_window, "first_needed", lambda config, computed: np.zeros_like(computed)),
    ),
    "hits lack a block of the window": ((start, "num_skipped", hits_without_last),),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, tmp_path, monkeypatch):
    seeds = seeds_with(with_uniform_window, 40)
    check_planted(PLANTED[bug], seeds, with_uniform_window, tmp_path, monkeypatch)


def bench_of(**settings):
    return Bench(**{"block_groups": GROUPS, "num_blocks": 200, "token_budget": 16, **settings})


@pytest.mark.parametrize("length", [100, 300])
def test_the_number_of_held_blocks_does_not_depend_on_the_length(length):
    bench = bench_of(max_model_len=400, num_blocks=9)
    one = request("long", length, max_tokens=99)
    most = most_held(bench, one)
    assert bench.tokens["long"] == reference_tokens(one, bench.config)[0]
    # A chunk of 16 tokens and the 5 previous tokens are in 6 blocks of 4 tokens. The limit adds a block for
    # tokens that begin inside a block.
    assert 5 < most <= most_blocks(GROUPS, 399, 4, 16) == 7
    assert held(bench) == 0


def test_blocks_are_released_as_soon_as_no_later_query_sees_them():
    bench = bench_of(token_budget=64, max_model_len=64)
    bench.submit(request("one", 20, max_tokens=20))
    bench.step()
    tables = []
    while bench.core.has_work:
        bench.step()
        if len(bench.state.running):
            row = bench.state.running[0]
            before = int(bench.state.num_computed[row] - bench.state.scheduled[row])
            tables.append((before, np.flatnonzero(bench.state.block_table[row]).tolist()))
    assert tables[:3] == [(20, [3, 4, 5]), (21, [4, 5]), (22, [4, 5])]
    assert tables[4:6] == [(24, [4, 5, 6]), (25, [5, 6])]


def test_blocks_with_accepted_drafts_are_released_and_stay_in_the_cache():
    groups = (BlockGroup(2, (0,)),)
    bench = bench_of(block_groups=groups, block_size=2, num_draft_tokens=9, max_model_len=128)
    one = request("one", 6, max_tokens=90)
    bench.submit(one)
    jumps = set()
    while bench.core.has_work:
        before = bench.state.num_computed[0]
        bench.step()
        jumps.add(int(bench.state.num_computed[0] - before))
        assert not list(broken_windows(bench.state))
    assert max(jumps) > 7  # a step computed several blocks, so several blocks left the window together
    assert bench.tokens["one"] == reference_tokens(one, bench.config)[0]
    prompt = [*one.prompt_token_ids.tolist(), *bench.tokens["one"]]
    admitted = admitted_of(bench, request("two", prompt, max_tokens=1))
    assert admitted.num_computed >= len(prompt) - 4


def test_a_request_shares_only_the_blocks_of_its_window():
    bench = bench_of(max_model_len=200, token_budget=64)
    bench.submit(request("first", [*PROMPT, 1, 2, 3, 4], max_tokens=1))
    bench.run()
    second = request("second", [*PROMPT, 9, 9], max_tokens=1)
    admitted = admitted_of(bench, second)
    assert admitted.num_computed == 80
    assert len(admitted.cached_blocks) == 4 * 2
    assert bench.tokens["second"] == reference_tokens(second, bench.config)[0]
    assert bench.core.stats().num_cached_tokens == 80


def test_without_the_first_block_a_prefix_is_computed_again():
    bench = bench_of(max_model_len=200, token_budget=64)
    bench.submit(request("first", [*PROMPT, 1], max_tokens=1))
    bench.run()
    blocks = bench.state.blocks
    blocks.forget(blocks.find_first(np.array(PROMPT, np.int32).reshape(-1, 4), {})[:1])
    second = request("second", [*PROMPT, 9], max_tokens=1)
    admitted = admitted_of(bench, second)
    assert admitted.num_computed == 0
    assert bench.tokens["second"] == reference_tokens(second, bench.config)[0]


@pytest.mark.parametrize("seed", seeds_with(with_uniform_window, 11)[8:])
def test_a_snapshot_at_any_event_restores_the_state(seed, tmp_path):
    for state, restored in restored_states(*run_chaos(seed, tmp_path / "log", with_uniform_window)):
        rows = state.running
        assert np.array_equal(restored.block_table[rows], state.block_table[rows])


def test_the_invariant_names_a_row_with_a_wrong_table():
    bench = bench_of(max_model_len=200, token_budget=64)
    bench.submit(request("one", 80, max_tokens=9))
    bench.step()
    bench.step()
    assert not list(broken_windows(bench.state))
    table, last = bench.state.block_table, int(bench.state.block_table[0, 19])
    table[0, 19] = 0
    assert "lacks the block at position 19" in next(broken_windows(bench.state))
    table[0, 19], table[0, 3] = last, 8
    assert "holds a block at position 3" in next(broken_windows(bench.state))


def test_a_log_verifies_and_under_other_rules_does_not(tmp_path, monkeypatch):
    check_windows(seeds_with(with_uniform_window, 3)[2], tmp_path / "log", with_uniform_window)
    assert verify(tmp_path / "log").ok
    monkeypatch.setattr(uniform_window, "first_needed", lambda config, computed: np.zeros_like(computed))
    assert not verify(tmp_path / "log").ok


def test_most_blocks_bounds_random_rows():
    for seed in seeds_with(with_uniform_window, 6):
        for config, state in random_states(seed, with_uniform_window):
            # A row holds a chunk for each step in flight.
            chunk = config.token_budget * config.max_in_flight
            for row in state.running.tolist():
                count = np.count_nonzero(state.block_table[row])
                assert count <= most_blocks(config.block_groups, 10**6, config.block_size, chunk)


@given(st.integers(2, 300), st.integers(1, 500), st.sampled_from([1, 4, 16]), st.integers(1, 600))
def test_a_row_is_as_long_as_the_pool_if_the_window_fits(window, num_blocks, size, chunk):
    groups = (BlockGroup(window, (0,)),)
    longest = longest_row(groups, num_blocks, size, chunk)
    assert most_blocks(groups, longest, size, chunk) <= num_blocks


def test_a_window_of_one_token_is_refused():
    with pytest.raises(ConfigError, match="must be at least 2"):
        settings_of(block_groups=(BlockGroup(1, (0,)),), num_blocks=200).check_resolved()
