"""Tests the decisions of single steps in small scenarios. A block has 4 tokens."""

import numpy as np
import pytest

from mmengine.core.decide.scheduler import SCHEDULER
from mmengine.core.state.digest import state_digest
from mmengine.core.state.view import View
from mmengine.events import vocabulary as ev
from mmengine.simulation.simulated_executor import reference_tokens
from tests.core.small_engine import Bench, image, ints, request, video


def told(event):
    """Return a decision as a short tuple, such as ("admit", request id, number of tokens)."""
    if isinstance(event, ev.Preempted):
        return "preempt", event.request_id
    if isinstance(event, ev.Admitted):
        return "admit", event.request_id, event.num_tokens
    return "run", ints(event.num_tokens)


def decided(bench):
    return [told(event) for event in bench.decisions()]


def check_answers(bench, *requests):
    bench.run()
    for one in requests:
        tokens, reason = reference_tokens(one, bench.config)
        assert (bench.tokens[one.request_id], bench.ends[one.request_id][0]) == (tokens, reason)


def test_running_rows_come_before_waiting_ones():
    bench = Bench(token_budget=8)
    bench.submit(request("a", 4))
    assert decided(bench) == [("admit", "a", 4)]
    bench.submit(request("b", 12))
    assert decided(bench) == [("run", None), ("admit", "b", 7)]
    assert decided(bench) == [("run", [1, 5])]
    assert decided(bench) == [("run", None)], "None stands for one token in each row"


def test_the_budget_is_spent_in_admission_order():
    bench = Bench(token_budget=6)
    bench.submit(request("a", 10), request("b", 10))
    assert decided(bench) == [("admit", "a", 6)]
    assert decided(bench) == [("run", [4]), ("admit", "b", 2)]
    assert decided(bench) == [("run", [1, 5])]
    assert decided(bench) == [("run", [1, 3])]
    check_answers(bench, request("a", 10), request("b", 10))


def test_a_row_without_budget_sits_a_step_out():
    bench = Bench(token_budget=8, encoder_budget=6)
    requests = [request("a", 24, media=[image(1, 0, 5), image(2, 6, 5)]), request("b", 20)]
    bench.submit(*requests)
    assert decided(bench) == [("admit", "a", 6), ("admit", "b", 2)], "a is cut before its second image"
    (alone,) = bench.decisions()
    assert (ints(alone.rows), ints(alone.num_tokens)) == ([0], [8])
    check_answers(bench, *requests)


def test_no_more_rows_than_there_are():
    bench = Bench(max_num_seqs=2)
    bench.submit(*(request(name, 3, max_tokens=2) for name in "abc"))
    assert decided(bench) == [("admit", "a", 3), ("admit", "b", 3)]
    assert decided(bench) == [("run", None)]
    assert decided(bench) == [("admit", "c", 3)]


def test_a_long_prompt_is_taken_in_pieces():
    bench = Bench(long_prefill_token_threshold=5)
    bench.submit(request("a", 12), request("b", 3))
    assert decided(bench) == [("admit", "a", 5), ("admit", "b", 3)]
    assert decided(bench) == [("run", [5, 1])]
    assert decided(bench) == [("run", [2, 1])]
    assert decided(bench) == [("run", None)]
    check_answers(bench, request("a", 12), request("b", 3))


def test_rows_are_written_down_only_when_they_change():
    bench = Bench()
    bench.submit(request("a", 3, max_tokens=3), request("b", 3, max_tokens=9))
    bench.decisions()
    rows = [ints(event.rows) for _ in range(4) for event in bench.decisions()]
    assert rows == [None, None, [1], None], "a has ended before the third of these steps"


def test_blocks_are_dealt_when_tokens_need_them():
    bench = Bench()
    bench.submit(request("a", 3, max_tokens=9))
    (admitted,) = bench.decisions()
    assert ints(admitted.new_blocks) == [1]
    blocks = [ints(bench.decisions()[0].new_blocks) for _ in range(6)]
    assert blocks == [[], [2], [], [], [], [3]]


def test_a_chunk_is_cut_before_an_image_that_is_over_the_encoder_budget():
    bench = Bench(encoder_budget=6)
    one = request("a", 20, media=[image(1, 2, 5), image(2, 10, 4)])
    bench.submit(one)
    (first,) = bench.decisions()
    assert told(first) == ("admit", "a", 10) and [index for _, _, index in first.encode] == [0]
    (second,) = bench.decisions()
    assert told(second) == ("run", [10]) and [index for _, _, index in second.encode] == [1]
    check_answers(bench, one)


def test_a_chunk_is_cut_inside_an_image_and_the_image_is_encoded_once():
    bench = Bench(token_budget=4)
    one = request("a", 12, media=[image(1, 2, 6)])
    bench.submit(one)
    steps = [bench.decisions()[0] for _ in range(3)]
    assert [len(step.encode) for step in steps] == [1, 0, 0]
    assert bench.state.encoder.entries[bytes([1, 6]).ljust(32, b"\0")].references == 0
    check_answers(bench, one)


def test_a_video_is_held_from_its_first_frame_to_its_last():
    bench = Bench(token_budget=4)
    one = request("a", 16, media=[video(1, (2, 2), (9, 2))])
    bench.submit(one)
    held = []
    for _ in range(5):
        bench.step()
        held.append(sum(entry.references for entry in bench.state.encoder.entries.values()))
    assert held == [1, 1, 1, 0, 0], "chunks 0-3, 4-7 (only text), 8-11, 12-15"
    assert bench.core.stats().num_encoded_items == 1
    check_answers(bench, one)


def test_text_between_frames_needs_no_features():
    """All frames are prefix cache hits, so request b encodes no frame."""
    bench = Bench()
    prompt, media = [7] * 16, [video(1, (1, 2), (5, 2))]
    bench.submit(request("a", prompt, media=media))
    bench.run()
    bench.submit(request("b", prompt, media=media))
    (admitted,) = bench.decisions()
    assert len(ints(admitted.cached_blocks)) == 3 and not admitted.encode
    assert bench.state.encoder.entries and not any(e.references for e in bench.state.encoder.entries.values())


def test_a_request_that_waits_for_the_encoder_is_passed_over():
    bench = Bench(encoder_budget=6)
    bench.submit(
        request("a", 8, media=[image(1, 0, 5)]),
        request("b", 8, media=[image(2, 0, 5)]),
        request("c", 8),
    )
    assert decided(bench) == [("admit", "a", 8), ("admit", "c", 8)]
    assert decided(bench) == [("run", None), ("admit", "b", 8)]


def test_a_passed_over_request_starts_with_the_text_before_its_image():
    bench = Bench(encoder_budget=6)
    bench.submit(request("a", 8, media=[image(1, 0, 5)]), request("b", 8, media=[image(2, 3, 5)]))
    assert decided(bench) == [("admit", "a", 8), ("admit", "b", 3)]


def test_a_request_that_waits_for_blocks_holds_back_later_ones():
    bench = Bench(num_blocks=17, max_model_len=64)
    bench.submit(request("a", 40, max_tokens=2))
    bench.decisions()
    bench.submit(request("b", 40), request("c", 4))
    assert decided(bench) == [("run", None)], "c would fit, but b was first"
    bench.run()
    assert set(bench.ends) == {"a", "b", "c"}


def test_a_request_is_not_admitted_into_blocks_for_its_first_chunk_only():
    bench = Bench(num_blocks=17, token_budget=24)
    bench.submit(request("a", 36, max_tokens=2), request("b", 36))
    assert decided(bench) == [("admit", "a", 24)]
    assert decided(bench) == [("run", [12])], "nine blocks of sixteen are held, and b needs nine"


def busy(policy):
    """Return a bench whose three rows fill a pool of 12 blocks, and the requests."""
    bench = Bench(num_blocks=13, max_model_len=48, policy=policy)
    requests = [
        request("a", 14, max_tokens=20, priority=5),
        request("b", 14, max_tokens=20, priority=1),
        request("c", 14, max_tokens=20, priority=3),
    ]
    for one in requests:  # one step per request, so that the requests are admitted in this order
        bench.submit(one)
        bench.step()
    return bench, requests


@pytest.mark.parametrize("policy, victim", [("fcfs", "c"), ("priority", "a")])
def test_the_victim_of_each_policy(policy, victim):
    bench, requests = busy(policy)
    events = bench.run()
    preempted = [event for event in events if isinstance(event, ev.Preempted)]
    assert preempted[0].request_id == victim
    assert (preempted[0].mode, preempted[0].reason) == ("recompute", "no free blocks")
    check_answers(bench, *requests)


def test_no_request_is_admitted_in_a_step_that_preempted():
    bench, _ = busy("fcfs")
    steps = []
    while bench.core.has_work:
        steps.append([type(event) for event in bench.decisions()])
    preempting = [step for step in steps if ev.Preempted in step]
    assert preempting and all(ev.Admitted not in step and ev.Scheduled in step for step in preempting)


def test_the_preempted_one_goes_to_the_front_and_keeps_its_tokens():
    bench, requests = busy("fcfs")
    late = request("d", 14, max_tokens=2)
    bench.submit(late)
    order = [told(event) for event in bench.run() if isinstance(event, ev.Admitted)]
    names = [name for _, name, _ in order]
    assert names.index("c") < names.index("d")
    check_answers(bench, *requests, late)


def test_more_important_ones_go_first_and_equals_by_arrival():
    bench = Bench(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        bench.submit(request(name, 3, max_tokens=1, priority=priority))
    order = [event.request_id for event in bench.run() if isinstance(event, ev.Admitted)]
    assert order == ["d", "b", "a", "c"]


def test_blocks_are_hits_in_the_step_that_fills_them():
    bench = Bench()
    prompt = list(range(100, 110))
    bench.submit(request("a", prompt), request("b", prompt))
    first, second = bench.decisions()
    assert ints(first.cached_blocks) == [] and ints(first.new_blocks) == [1, 2, 3]
    assert ints(second.cached_blocks) == [1, 2] and second.num_tokens == 2
    check_answers(bench, request("a", prompt), request("b", prompt))


def test_the_last_token_is_always_computed():
    bench = Bench()
    prompt = list(range(100, 108))
    bench.submit(request("a", prompt))
    bench.run()
    bench.submit(request("b", prompt))
    (admitted,) = bench.decisions()
    assert len(ints(admitted.cached_blocks)) == 1 and admitted.num_tokens == 4


def test_answers_are_hits_too():
    bench = Bench()
    bench.submit(request("a", list(range(100, 106)), max_tokens=7))
    bench.run()
    longer = [*range(100, 106), *bench.tokens["a"], 7]
    bench.submit(request("b", longer))
    (admitted,) = bench.decisions()
    assert len(ints(admitted.cached_blocks)) == 3, "the KV of 12 of the 13 tokens was computed"
    check_answers(bench, request("b", longer))


def test_without_prefix_caching_nothing_is_a_hit():
    bench = Bench(enable_prefix_caching=False)
    prompt = list(range(100, 110))
    bench.submit(request("a", prompt), request("b", prompt))
    assert all(not ints(event.cached_blocks) for event in bench.decisions())


def test_a_hit_on_a_free_block_takes_it_out_of_the_line():
    bench = Bench(num_blocks=17)
    prompt = list(range(100, 109))
    bench.submit(request("a", prompt, max_tokens=1))
    bench.run()
    free = bench.state.blocks.free_list.order().tolist()
    assert free[-2:] == [2, 1]
    bench.submit(request("b", [*prompt, *range(40)], max_tokens=1))
    (admitted,) = bench.decisions()
    assert ints(admitted.cached_blocks) == [1, 2]
    assert not {1, 2} & set(ints(admitted.new_blocks)) and len(set(ints(admitted.new_blocks))) == 11


def test_tenants_share_nothing():
    bench = Bench()
    prompt, media = list(range(100, 112)), [image(1, 5, 4)]
    bench.submit(request("a", prompt, media=media, cache_salt="x"))
    bench.run()
    for name, salt, hits, encoded in (("b", "y", 0, 1), ("c", "", 0, 1), ("d", "x", 2, 0)):
        bench.submit(request(name, prompt, media=media, cache_salt=salt))
        (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
        assert (len(ints(admitted.cached_blocks)), len(admitted.encode)) == (hits, encoded)


def test_an_image_at_another_place_is_no_block_hit_but_is_not_encoded_again():
    bench = Bench()
    prompt = [7] * 16
    first, moved = (request(name, prompt, media=[image(1, at, 4)]) for name, at in (("a", 4), ("b", 5)))
    bench.submit(first)
    bench.run()
    bench.submit(moved)
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    assert len(ints(admitted.cached_blocks)) == 1 and not admitted.encode
    stats = bench.core.stats()
    assert (stats.num_encoded_items, stats.num_encoder_hits) == (1, 1)
    check_answers(bench, first, moved)


def test_another_image_at_the_same_place_is_no_hit():
    bench = Bench()
    prompt = [7] * 16
    one, other = request("a", prompt, media=[image(1, 4, 4)]), request("b", prompt, media=[image(2, 4, 4)])
    bench.submit(one)
    bench.run()
    bench.submit(other)
    (admitted,) = [event for event in bench.run() if isinstance(event, ev.Admitted)]
    assert len(ints(admitted.cached_blocks)) == 1 and len(admitted.encode) == 1
    check_answers(bench, one, other)


def test_one_image_in_two_rows_of_a_step_is_encoded_once():
    bench = Bench()
    bench.submit(*(request(name, 8, media=[image(1, 2, 4)]) for name in "ab"))
    first, second = bench.decisions()
    assert (len(first.encode), len(second.encode)) == (1, 0)
    check_answers(bench, *(request(name, 8, media=[image(1, 2, 4)]) for name in "ab"))


def test_the_longest_unused_feature_goes_first_and_a_used_one_never():
    bench = Bench(encoder_cache_size=8)
    for name, tag in (("a", 1), ("b", 2), ("c", 1)):
        bench.submit(request(name, 8, media=[image(tag, 2, 4)], max_tokens=1))
        bench.run()
    bench.submit(request("d", 8, media=[image(3, 2, 4)], max_tokens=1))
    (admitted,) = bench.decisions()
    assert [key[0] for key in admitted.evict] == [2], "1 was used again by c"
    bench.run()
    assert {key[0] for key in bench.state.encoder.entries} == {1, 3}
    assert set(bench.executor._features) == set(bench.state.encoder.entries)


def test_a_requests_features_are_not_evicted_for_its_next_image():
    bench = Bench(encoder_cache_size=8)
    for name, tag in (("a", 1), ("b", 2)):
        bench.submit(request(name, 8, media=[image(tag, 2, 4)], max_tokens=1))
        bench.run()
    both = request("c", 12, media=[image(1, 2, 4), image(3, 6, 4)])
    bench.submit(both)
    (admitted,) = bench.decisions()
    assert [key[0] for key in admitted.evict] == [2], "1 is older, but c is about to use it"
    assert [(key[0], index) for key, _, index in admitted.encode] == [(3, 1)]
    check_answers(bench, both)


def test_a_row_that_waits_for_room_lets_others_run():
    """While request a's image fills the encoder cache, request b waits and request c runs."""
    bench = Bench(token_budget=6, encoder_cache_size=6, max_num_seqs=3)
    requests = [
        request("a", 14, media=[image(1, 0, 6), image(2, 7, 6)]),
        request("b", 9, media=[image(3, 1, 5)]),
        request("c", 3, max_tokens=9),
    ]
    bench.submit(*requests)
    check_answers(bench, *requests)
    assert bench.core.stats().num_encoded_items == 3


def test_the_view_refuses_writes():
    bench = Bench()
    bench.submit(request("a", 5))
    bench.step()
    view = View(bench.state)
    columns = ("num_tokens", "num_computed", "num_blocks", "token_ids", "block_table", "ended", "content")
    for name in columns:
        with pytest.raises(ValueError, match="read-only"):
            getattr(view, name)[0] = 1
    bench.state.num_tokens[0] = 6
    assert view.num_tokens[0] == 6, "a view, no copy"


def test_schedule_changes_nothing():
    bench = Bench()
    bench.submit(request("a", 5), request("b", 9, media=[image(1, 1, 3)]))
    bench.step()
    before = state_digest(bench.state)
    view = View(bench.state)
    assert SCHEDULER.schedule(view) == SCHEDULER.schedule(view)
    assert state_digest(bench.state) == before


def test_a_plan_owns_its_arrays():
    """A plan shares no memory with the state: a device may read the plan during the next decision."""
    plans = []
    bench = Bench()
    dispatch = bench.executor.dispatch
    bench.executor.dispatch = lambda plan: (plans.append(plan), dispatch(plan))
    bench.submit(request("a", 5, max_tokens=3), request("b", 9, media=[image(1, 1, 3)]))
    bench.step()
    (plan,) = plans
    state = bench.state
    own = [plan.num_scheduled, plan.num_computed, plan.input_ids, plan.block_table]
    own += [admission.token_ids for admission in plan.admitted]
    columns = [state.token_ids, state.block_table, state.num_computed, state.scheduled]
    assert not any(np.shares_memory(array, column) for array in own for column in columns)
    assert plan.input_ids.dtype == plan.block_table.dtype == plan.sample.dtype == np.int32
    assert plan.slot_mapping.dtype == np.int64 and plan.sample.tolist() == [0, 1]
    assert plan.slot_mapping.tolist() == [*range(4, 9), *range(12, 21)]
    assert plan.block_table.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert [(span.start, span.item_start, span.length) for span in plan.media] == [(6, 0, 3)]
