"""Tests the state invariants: each kind of damage breaks exactly the named invariant."""

import numpy as np
import pytest
from msgspec.structs import replace

from mmengine.cli.logs.verify import report_lines
from mmengine.core import batch as planning
from mmengine.core.decide import running
from mmengine.core.engine import EngineCore
from mmengine.core.fold import rows
from mmengine.core.state.blocks import BlockPool
from mmengine.core.state.columns import NEVER
from mmengine.core.state.state import State
from mmengine.events.log import LogWriter
from mmengine.replay.invariants import INVARIANTS, find_broken
from mmengine.replay.verify import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import Bench, image, request, settings_of
from tests.replay.planted.nights import Night


def busy() -> State:
    """Return a state with two scheduled rows and two waiting requests. The step's result is not logged yet. A
    row's chunk ends inside an image.
    """
    bench = Bench(swap_blocks=4, max_num_seqs=2, long_prefill_token_threshold=6)
    bench.submit(request("a", 20, media=[image(1, 2, 6)]), request("b", 9), request("c", 3), request("d", 3))
    bench.step()
    return bench.state


def lose_a_block(state):
    state.blocks.free_list.num_free -= 1


def forget_a_reference(state):
    state.blocks.references[state.block_table[state.running[0], 0]] -= 1


def drop_a_host_block(state):
    state.free_host_blocks = state.free_host_blocks[1:]


def free_a_row_that_runs(state):
    state.free_rows.append(int(state.running[0]))


def queue_a_running_request(state):
    state.waiting.insert(0, state.requests["a"])


def overspend(state):
    state.encoder_left = -1


def compute_unknown_tokens(state):
    state.num_computed[state.running[1]] += 40


def leak_an_encoder_reference(state):
    next(iter(state.encoder.entries.values())).references += 1


def forget_an_encoder_entry(state):
    state.encoder.entries.clear()
    state.encoder.used = 0


def drop_an_encoder_reference_early(state):
    """Release a request's encoder output before the row has computed its image. The encoder cache and the
    request still agree, so only the invariant `media` breaks.
    """
    req_state = state.requests["a"]
    req_state.held_media.clear()
    state.release_at[req_state.row] = NEVER
    state.encoder.release(req_state.media_keys[0])


def miscount_idle_embeddings(state):
    state.encoder.idle_size += 1


def count_a_step_in_flight(state):
    state.in_flight[0] += 1


def count_too_few_tokens(state):
    state.tokens_left += 1


def encode_too_much(state):
    state.step_encoded *= 20


def run_a_row_twice(state):
    state.step_rows = np.concatenate((state.step_rows, state.step_rows[:1]))
    state.tokens_left -= int(state.scheduled[state.step_rows[0]])


def draft_too_much(state):
    state.num_drafts[state.running[1]] = 1


def reverse_the_rows(state):
    state.requests["a"].admitted_step += 1


def reverse_the_queue(state):
    state.waiting.reverse()


def lose_a_tenant(state):
    next(iter(state.tenants.all.values())).num_live -= 1


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lose_a_block, "blocks"),
        (forget_a_reference, "references"),
        (drop_a_host_block, "host_blocks"),
        (free_a_row_that_runs, "rows"),
        (queue_a_running_request, "rows"),
        (overspend, "budgets"),
        (compute_unknown_tokens, "computed"),
        (leak_an_encoder_reference, "encoder"),
        (forget_an_encoder_entry, "encoder"),
        (drop_an_encoder_reference_early, "media"),
        (miscount_idle_embeddings, "encoder"),
        (count_a_step_in_flight, "flights"),
        (count_too_few_tokens, "budgets"),
        (encode_too_much, "budgets"),
        (run_a_row_twice, "budgets"),
        (draft_too_much, "budgets"),
        (reverse_the_rows, "queue"),
        (reverse_the_queue, "queue"),
        (lose_a_tenant, "tenants"),
    ],
)
def test_damage_is_detected(damage, name):
    state = busy()
    assert find_broken(state) is None
    damage(state)
    assert find_broken(state).name == name
    assert find_broken(state, name).text
    assert [each for each in INVARIANTS if find_broken(state, each)] == [name]


def free_twice(patch):
    release = BlockPool.release

    def twice(pool, blocks):
        release(pool, blocks)
        if len(blocks):
            pool.free_list.give_front(blocks[:1])

    patch.setattr(BlockPool, "release", twice)


def hold_no_encoder_output(patch):
    reference = rows.reference_media

    def and_let_go(state, row):
        reference(state, row)
        req_state = state.requests_by_row[row]
        for index in sorted(req_state.held_media):
            state.encoder.release(req_state.media_keys[index])
        req_state.held_media.clear()
        state.release_at[row] = NEVER

    patch.setattr(rows, "reference_media", and_let_go)


def overrun_the_budget(patch):
    patch.setattr(running, "_within_budget", lambda wanted, budget: wanted.astype(np.int32))


@pytest.mark.parametrize(
    ("plant", "name", "event"),
    [
        (free_twice, "blocks", "Finished"),
        (hold_no_encoder_output, "media", "Admitted"),
        (overrun_the_budget, "budgets", "Scheduled"),
    ],
)
def test_a_bug_that_verify_repeats_is_named_by_its_invariant(tmp_path, plant, name, event):
    """`verify` alone finds nothing, because the build repeats its wrong decisions. The invariants find the
    bug, because they check the state itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        config = settings_of(token_budget=8, max_num_seqs=2)
        core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
        core.submit(request("a", 20, media=[image(1, 2, 12)], max_tokens=2))
        core.step()
        core.submit(request("b", 20, max_tokens=2))
        for _ in range(8):
            core.step()
        core.close()
        report, plain = verify(tmp_path / "log", invariants=True), verify(tmp_path / "log")
    assert plain.ok and plain.rederived
    found = report.divergence
    assert (found.field, found.event) == (f"invariant {name}", event)
    assert f"invariant {name}" in report_lines(report)[-1] and found.derived


def test_a_sound_log_keeps_its_invariants(tmp_path):
    config = settings_of(num_blocks=17, max_num_seqs=3, policy="priority", num_draft_tokens=2)
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    for number in range(8):
        media = [image(number % 3, 2, 6)]
        core.submit(request(f"r{number}", 12, media=media, max_tokens=20, priority=number % 3))
    while core.has_work:
        core.step()
    core.close()
    assert core.stats().num_preemptions
    report = verify(tmp_path / "log", invariants=True)
    assert report.ok and report.rederived


def test_a_plan_that_swaps_the_wrong_way_is_found(tmp_path, monkeypatch):
    real = planning.batch

    def batch(view, decisions, tables):
        plan = real(view, decisions, tables)
        return plan if plan.swap_in is None else replace(plan, swap_in=plan.swap_in[:, ::-1].copy())

    monkeypatch.setattr(planning, "batch", batch)
    settings = {"swap_blocks": 30, "preempt_mode": "swap"}
    Night(settings, num_requests=30).run(tmp_path / "log")
    found = verify(tmp_path / "log", invariants=True).divergence
    assert found.field == "invariant plan" and "copies swap_in" in found.derived


def test_a_state_that_cannot_be_checked_is_broken():
    # If a check raises, its invariant counts as broken.
    state = busy()
    state.requests_by_row[state.running[0]] = None
    found = find_broken(state, "grammars")
    assert found.name == "grammars" and "too damaged to be checked (AttributeError" in found.text
