"""Tests slots for recurrent states: which rows hold a slot, which states are kept, and from which state a
request continues.
"""

from msgspec.structs import replace

from mmengine.core.state.columns import NEVER
from mmengine.core.state.state_slots import next_kept
from mmengine.events import vocabulary as ev
from mmengine.events.codec import as_logged
from tests.core.small_engine import Bench, ints, request

SLOTS = {"num_state_slots": 6, "snapshot_every": 8}


def bench(**settings):
    return Bench(**SLOTS | settings)


def admitted(events):
    return [event for event in events if isinstance(event, ev.AdmittedWithState)]


def kept(events):
    """Return (row, number of tokens) for each kept state."""
    found = [event for event in events if isinstance(event, ev.StatesKept)]
    return [pair for event in found for pair in zip(ints(event.rows), ints(event.num_tokens), strict=True)]


def test_where_states_are_kept():
    """With a prompt of 30 tokens, 12 shared tokens and blocks of 4, states are kept at multiples of 8, after
    the shared tokens (12), and after the last full block before the prompt's last token (28).
    """
    places, place = [], 0
    while (place := next_kept(place, 30, 12, 8, 4)) < 40:
        places.append(place)
    assert places == [8, 12, 16, 24, 28, 32]
    assert next_kept(0, 4, 0, 0, 4) == NEVER and next_kept(0, 5, 0, 0, 4) == 4
    assert next_kept(0, 1, 0, 6, 4) == 8, "6 is rounded up to full blocks"


def test_a_prompt_shorter_than_the_distance_is_a_hit():
    """Even without regular intervals (`snapshot_every` 0), a state is kept after the last full block."""
    engine = bench(snapshot_every=0)
    prompt = list(range(7))
    engine.submit(request("first", prompt))
    assert kept(engine.run()) == [(0, 4)]
    engine.submit(request("again", prompt), request("longer", [*prompt, 50, 51]))
    one, other = admitted(engine.run())
    for event in (one, other):
        assert len(ints(event.cached_blocks)) == 1 and event.state_from != ev.NO_STATE
    assert one.state_slot != other.state_slot


def test_a_state_is_kept_where_a_shared_prefix_ends():
    """The prompts share only their first 12 tokens. States are not kept at regular intervals
    (`snapshot_every` 0), so a state is kept at 12 only because the shared prefix ends there.
    """
    engine = bench(snapshot_every=0, max_num_seqs=1)
    beginning = list(range(12))
    prompts = {name: [*beginning, *range(100 * n, 100 * n + 9)] for n, name in enumerate("abc", 1)}
    seen = {}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt))
        events = engine.run()
        (event,) = admitted(events)
        seen[name] = (len(ints(event.cached_blocks)), event.num_shared, (0, 12) in kept(events))
    assert seen == {"a": (0, 0, False), "b": (0, 12, True), "c": (3, 12, False)}


def test_rows_wait_for_slots_and_kept_states_give_way():
    engine = bench(num_state_slots=2, max_num_seqs=4)
    engine.submit(*(request(name, 9, max_tokens=6) for name in "abc"))
    events = engine.step()
    assert [event.request_id for event in admitted(events)] == ["a", "b"] and not kept(events)
    engine.run()
    assert engine.ends.keys() == set("abc")
    assert not engine.state.states.held.any() and engine.state.states.num_free == 2


def test_the_longest_unused_state_goes_first():
    engine = bench(num_state_slots=3, snapshot_every=0, max_num_seqs=1)
    prompts = {"a": list(range(10, 16)), "b": list(range(20, 26))}

    def hits(name):
        engine.submit(request(f"{name}{engine.state.num_arrived}", prompts[name], max_tokens=1))
        return admitted(engine.run())[0].state_from != ev.NO_STATE

    assert [hits(name) for name in "abab"] == [False, False, True, True]
    assert hits("a"), "used last"
    prompts["c"] = list(range(30, 36))
    assert not hits("c"), "c's state replaces b's state"
    assert hits("a") and not hits("b")


def test_a_state_whose_block_is_gone_goes_before_one_that_can_be_hit():
    engine = bench(num_state_slots=3, snapshot_every=0, max_num_seqs=1)
    engine.submit(request("a", 6, max_tokens=1))
    engine.run()
    slots, index = engine.state.states, engine.state.blocks.index
    (old,) = (slots.content >= 0).nonzero()[0].tolist()
    index.forget(slots.block[[old]])
    assert slots.peek(3).tolist() == [*(n for n in range(3) if n != old), old]
    engine.submit(request("b", 6, max_tokens=1))
    engine.run()
    (new,) = (n for n in range(3) if slots.content[n] >= 0 and n != old)
    assert slots.peek(3).tolist()[-2:] == [old, new]


def test_states_kept_by_a_failed_step_are_forgotten():
    engine = bench(fault=lambda step: "planted" if step == 0 else None)
    engine.submit(request("a", list(range(9)), max_tokens=1))
    events = engine.run()
    first, again = admitted(events)
    assert kept(events)[0] == (0, 8) and any(isinstance(event, ev.Failed) for event in events)
    assert again.state_from == ev.NO_STATE and not ints(again.cached_blocks)
    assert engine.ends["a"][0] == "length"


def test_a_preempted_request_continues_from_its_last_state():
    """The pool has blocks for one and a half requests. The second request is preempted, is admitted again
    without a swap, and finishes.
    """
    engine = bench(num_blocks=14, max_model_len=48, snapshot_every=4)
    engine.submit(request("a", 16, max_tokens=24), request("b", 16, max_tokens=24))
    events = engine.run()
    again = [event for event in admitted(events) if event.request_id == "b"][1:]
    assert again and all(event.swap_in is False for event in again)
    assert engine.state.num_preempted > 0
    assert engine.ends == {"a": ("length", ""), "b": ("length", "")}


def test_a_model_without_states_writes_what_it_always_wrote():
    # Without state slots, the log has no event types for states.
    engine = Bench()
    engine.submit(request("a", 9))
    events = engine.run()
    kinds = {ev.Queued, ev.Admitted, ev.Scheduled, ev.Executed, ev.Finished}
    assert {type(event) for event in events} == kinds


def test_an_admission_with_a_state_is_read_as_one():
    # AdmittedWithState is read back with all fields, and is also an Admitted.
    event = ev.AdmittedWithState("a", 1, 2, b"", b"", state_slot=3, state_from=4, num_shared=8)
    assert as_logged(event) == event and isinstance(as_logged(event), ev.Admitted)
    assert replace(event, request_id="b").state_from == 4
