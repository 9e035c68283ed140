"""Tests block groups: in layers with a sliding window, a row frees blocks that no later query sees."""

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
from workloads import with_windows

from mmengine.block_groups import BlockGroup, groups_problem, longest_row, most_blocks
from mmengine.core.decide import start
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.window_blocks import WindowTables
from mmengine.errors import ConfigError
from mmengine.events import vocabulary as ev
from mmengine.replay import verify
from mmengine.replay.block_invariants import broken_windows
from mmengine.simulation.simulated_executor import reference_tokens

GROUPS = (BlockGroup(0, (0,)), BlockGroup(6, (1,)), BlockGroup(6, (2,)), BlockGroup(13, (3,)))


PROMPT = list(range(500, 580))


@pytest.mark.parametrize("seed", seeds_with(with_windows, 6))
def test_each_key_in_a_window_is_present_despite_faults(seed, tmp_path):
    check_windows(seed, tmp_path / "log", with_windows)


@pytest.mark.soak
def test_each_key_in_a_window_is_present_despite_faults_in_the_long_run(tmp_path):
    for seed in seeds_with(with_windows, 150)[6:]:
        check_windows(seed, tmp_path / str(seed), with_windows)


def too_early(tables, rows, num_computed):
    return released(tables, rows, num_computed + tables._size)


released = WindowTables.release


def never(tables, rows, num_computed):
    return np.zeros(0, np.int32)


def any_block(view, req_state, cached):
    """Accept all hits in the first group even if a window's block is missing, and use block 1 instead."""
    computed = len(cached) * view.block_size
    first = view.windows.first_needed(computed)[:, 0].tolist() if len(cached) else []
    blocks = np.maximum(1, view.blocks.find_windows(np.asarray(view.blocks.content[cached])))
    shared = (blocks[group, number:] for group, number in enumerate(first))
    return np.concatenate((cached, *shared)), computed


PLANTED = {
    "blocks are released too early": ((WindowTables, "release", too_early),),
    "blocks are never released": ((WindowTables, "release", never),),
    "hits with missing windows": ((start, "window_hits", any_block),),
    "drafts count as accepted": (
        (WindowTables, "release", lambda tables, rows, computed: released(tables, rows, computed + 2)),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, tmp_path, monkeypatch):
    # Seed 41 runs first, because no other seed finds the hits with missing windows.
    seeds = sorted(seeds_with(with_windows, 30), key=lambda seed: seed != 41)
    check_planted(PLANTED[bug], seeds, with_windows, tmp_path, monkeypatch)


def bench_of(**settings):
    values = {"block_groups": GROUPS, "num_blocks": 200, "token_budget": 16, **settings}
    return Bench(**values)


def test_a_long_row_holds_windows_and_not_its_whole_length():
    bench = bench_of(max_model_len=400, num_blocks=400)
    most = most_held(bench, request("long", 100, max_tokens=200))
    assert bench.tokens["long"] == reference_tokens(request("long", 100, max_tokens=200), bench.config)[0]
    # 300 tokens fill 75 blocks in the first group. The other groups need at most 7, 7 and 8 blocks for a
    # chunk of 16 tokens and the window before the chunk.
    assert 75 < most <= most_blocks(GROUPS, 300, 4, 16) < 75 + 7 + 7 + 9
    assert held(bench) == 0


def test_blocks_are_released_as_soon_as_no_later_query_sees_them():
    bench = bench_of(token_budget=64, max_model_len=64)
    bench.submit(request("one", 20, max_tokens=20))
    bench.step()
    starts = []
    while bench.core.has_work:
        bench.step()
        if len(bench.state.running):
            row = bench.state.running[0]
            before = int(bench.state.num_computed[row] - bench.state.scheduled[row])
            starts.append((before, *bench.state.windows.first_held[:, row].tolist()))
    assert starts[:6] == [
        (20, 3, 3, 2),
        (21, 4, 4, 2),
        (22, 4, 4, 2),
        (23, 4, 4, 2),
        (24, 4, 4, 3),
        (25, 5, 5, 3),
    ]


def test_a_shared_prefix_needs_the_blocks_of_the_windows_before_it():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    bench.submit(request("first", [*PROMPT, 1, 2, 3, 4], max_tokens=1))
    bench.run()
    second = request("second", [*PROMPT, 9, 9], max_tokens=1)
    admitted = admitted_of(bench, second)
    assert admitted.num_computed == 80
    blocks = np.frombuffer(admitted.cached_blocks, np.int32)
    assert len(blocks) == 20 + 2 + 2 + 3  # the windows of 6 and 13 tokens reach 2 and 3 blocks back
    assert bench.tokens["second"] == reference_tokens(second, bench.config)[0]


def test_without_a_windows_block_a_request_starts_earlier():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    bench.submit(request("first", [*PROMPT, 1], max_tokens=1))
    bench.run()
    state = bench.state
    contents = state.blocks.content[state.blocks.find_first(np.array(PROMPT, np.int32).reshape(-1, 4), {})]
    lost = int(state.blocks.find_windows(contents[18:19])[2, 0])
    state.blocks.windows.forget(np.array([lost]))
    second = request("second", [*PROMPT, 9], max_tokens=1)
    admitted = admitted_of(bench, second)
    assert admitted.num_computed == 18 * 4
    assert bench.tokens["second"] == reference_tokens(second, bench.config)[0]


def test_rows_that_share_windows_release_a_block_once():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    prompts = {name: request(name, list(range(500, 540)), max_tokens=40) for name in ("a", "b", "c")}
    bench.submit(*prompts.values())
    bench.run()
    for name, one in prompts.items():
        assert bench.tokens[name] == reference_tokens(one, bench.config)[0]
    assert held(bench) == 0


def test_a_broken_row_leaves_no_content_in_windows():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    bench.submit(request("one", 80, max_tokens=3))
    bench.step()
    state = bench.state
    contents = state.blocks.content[state.block_table[0, :20]].copy()
    assert (state.blocks.find_windows(contents)[0] > 0).any()
    state.ended[0] = 2  # BROKEN
    evolve(state, ev.Finished("one", "error"))
    assert not (state.blocks.find_windows(contents)[:3] > 0).any()


@pytest.mark.parametrize("seed", seeds_with(with_windows, 9)[6:])
def test_a_snapshot_at_any_event_restores_the_state(seed, tmp_path):
    for state, restored in restored_states(*run_chaos(seed, tmp_path / "log", with_windows)):
        assert np.array_equal(restored.windows.release_at, state.windows.release_at)
        assert restored.blocks.windows._block_of == state.blocks.windows._block_of


def test_the_digest_covers_tables_and_contents():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    bench.submit(request("one", 80, max_tokens=9))
    bench.step()
    bench.step()
    state, before = bench.state, state_digest(bench.state)
    for array in (
        state.windows.tables[:, :, 19:20],
        state.windows.first_held[:, :1],
        state.blocks.windows.keys,
    ):
        array += 1
        assert state_digest(state) != before
        array -= 1
    assert state_digest(state) == before


def test_the_invariant_names_a_row_with_a_wrong_table():
    bench = bench_of(max_model_len=200, num_blocks=400, token_budget=64)
    bench.submit(request("one", 80, max_tokens=9))
    bench.step()
    bench.step()
    assert not list(broken_windows(bench.state))
    bench.state.windows.first_held[1, 0] += 1
    (text,) = list(broken_windows(bench.state))[:1]
    assert "in group 2" in text


def test_a_log_with_groups_verifies_and_a_changed_one_does_not(tmp_path, monkeypatch):
    """An engine that never releases blocks in windows does not reproduce the log."""
    run_chaos(seeds_with(with_windows, 4)[3], tmp_path / "log", with_windows)
    assert verify(tmp_path / "log").ok
    monkeypatch.setattr(WindowTables, "release", never)
    assert not verify(tmp_path / "log").ok


def test_most_blocks_bounds_random_rows():
    for seed in seeds_with(with_windows, 4):
        for config, state in random_states(seed, with_windows):
            for row in state.running.tolist():
                count = int(state.num_blocks[row])
                total = count + len(state.windows.held_by(row, count))
                # If a row is in two steps in flight, the row has blocks for two chunks.
                chunk = config.token_budget * config.max_in_flight
                assert total <= most_blocks(
                    config.block_groups, count * config.block_size, config.block_size, chunk
                )


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.integers(1, 5000),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 600),
)
def test_the_longest_row_fits_and_a_longer_one_does_not(windows, num_blocks, size, chunk):
    groups = (BlockGroup(0, (0,)), *(BlockGroup(w, (n,)) for n, w in enumerate(windows, 1)))
    longest = longest_row(groups, num_blocks, size, chunk)
    assert most_blocks(groups, longest, size, chunk) <= num_blocks
    assert most_blocks(groups, longest + 1, size, chunk) > num_blocks


REFUSED = {
    "one group without a window needs no block_groups": {"block_groups": GROUPS[:1]},
    "must see all keys": {"block_groups": GROUPS[1:]},
    "group 1 has no window": {"block_groups": (GROUPS[0], BlockGroup(0, (7,)))},
    "a layer is in two groups": {"block_groups": (*GROUPS, BlockGroup(9, (1,)))},
    "cannot go with swap_blocks": {"swap_blocks": 4},
    "cannot go with compat": {"compat": "vllm"},
    "cannot go with num_state_slots": {"num_state_slots": 4},
    "less than max_model_len": {"num_blocks": 30},
}


@pytest.mark.parametrize("text", REFUSED)
def test_settings_that_contradict_groups_are_refused(text):
    with pytest.raises(ConfigError, match=text):
        settings_of(**{"block_groups": GROUPS, "num_blocks": 200, **REFUSED[text]}).check_resolved()
    assert groups_problem(GROUPS) is None and groups_problem(()) is None
