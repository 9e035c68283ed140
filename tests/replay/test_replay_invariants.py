"""Each invariant sees the damage that it is there for, and nothing else is broken by accident."""

import pytest

from mmengine.core.state.state import State
from mmengine.replay.invariants import INVARIANTS, broken
from tests.core.small_engine import Bench, image, request


def busy() -> State:
    bench = Bench(swap_blocks=4)
    bench.submit(request("a", 20, media=[image(1, 2, 6)]), request("b", 9))
    bench.step()
    return bench.state


def lose_a_block(state):
    state.blocks.free_list.num_free -= 1


def forget_a_reference(state):
    state.blocks.references[state.block_table[state.running[0], 0]] -= 1


def drop_a_host_block(state):
    state.free_host_blocks = state.free_host_blocks[1:]


def take_a_row(state):
    state.free_rows.pop()


def queue_a_running_request(state):
    state.waiting.append(state.requests["a"])


def overspend(state):
    state.encoder_left = -1


def compute_the_unknown(state):
    state.num_computed[state.running[1]] += 40


def leak_an_encoder_reference(state):
    next(iter(state.encoder.entries.values())).references += 1


def forget_an_encoder_entry(state):
    state.encoder.entries.clear()
    state.encoder.used = 0


def count_a_step_in_flight(state):
    state.in_flight[0] += 1


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lose_a_block, "blocks"),
        (forget_a_reference, "references"),
        (drop_a_host_block, "host_blocks"),
        (take_a_row, "rows"),
        (queue_a_running_request, "rows"),
        (overspend, "budgets"),
        (compute_the_unknown, "computed"),
        (leak_an_encoder_reference, "encoder"),
        (forget_an_encoder_entry, "encoder"),
        (count_a_step_in_flight, "flights"),
    ],
)
def test_damage_is_seen(damage, name):
    state = busy()
    assert broken(state) is None
    damage(state)
    assert broken(state).name == name
    assert broken(state, name).what
    assert [each for each in INVARIANTS if broken(state, each)] == [name]
