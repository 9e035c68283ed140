"""Tests how LoRA adapters get the `max_loras` places in a step, and that no request waits forever."""

import random

import numpy as np
import pytest

from mmengine.core.decide import adapter_places
from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.request import Adapter
from mmengine.simulation.simulated_executor import reference_tokens
from tests.core.small_engine import Bench, image, request

MOST = 8  # answer length in tokens


def adapter(tag, num_bytes=10, *, visual=False):
    return Adapter(bytes([tag]) * 32, num_bytes, visual, f"adapter {tag}")


def bench(**settings):
    return Bench(**{"max_loras": 2, "lora_bytes": 100, "max_num_seqs": 8, "num_blocks": 200} | settings)


def admitted(events):
    return [event.request_id for event in events if isinstance(event, ev.Admitted)]


def test_as_many_adapters_as_there_are_places():
    """Request 2 waits, because requests 0 and 1 use other adapters in both places."""
    engine = bench()
    for number, tag in enumerate((1, 2, 3, 1)):
        engine.submit(request(f"{number}", 5, adapter=adapter(tag)))
    engine.submit(request("none", 5))
    assert admitted(engine.step()) == ["0", "1", "3", "none"], (
        "request 2 waits, because adapter 3 has no place"
    )
    engine.run()
    assert engine.ends.keys() == {"0", "1", "2", "3", "none"}


def test_the_next_place_is_for_the_longest_waiting_request():
    """A request that waits for a place is not overtaken by much later requests for a running adapter."""
    engine = bench(max_num_seqs=2)
    engine.submit(request("on 1", 5, max_tokens=3, adapter=adapter(1)))
    engine.submit(request("on 2", 5, max_tokens=20, adapter=adapter(2)))
    engine.step()
    engine.submit(request("waits", 5, adapter=adapter(3)), request("later", 5, adapter=adapter(4)))
    engine.submit(*(request(f"more {number}", 5, max_tokens=3, adapter=adapter(1)) for number in range(4)))
    order = admitted(engine.run())
    assert order[0] == "waits", "adapter 1 left, and no later request takes its place"
    assert order.index("later") < order.index("more 3")


def test_idle_adapters_stay_until_their_memory_is_needed():
    engine = bench(lora_bytes=25, max_num_seqs=1)
    out = []
    for tag in (1, 2, 1, 3, 2, 3):
        engine.submit(request(f"{tag} {len(out)}", 5, adapter=adapter(tag)))
        (event,) = (each for each in engine.run() if isinstance(each, ev.AdmittedWithAdapter))
        out.append([digest[0] for digest in event.adapters_out])
    assert out == [[], [], [], [2], [1], []]


def test_an_adapter_larger_than_all_room_is_refused():
    engine = bench()
    with pytest.raises(InvalidRequest, match="lora_bytes"):
        engine.submit(request("a", 5, adapter=adapter(1, 101)))
    with pytest.raises(InvalidRequest, match="max_loras"):
        Bench().submit(request("a", 5, adapter=adapter(1)))


def test_prefixes_and_features_are_shared_by_content_alone():
    """Adapters share KV only if their digests are equal. All adapters that leave the vision encoder unchanged
    share encoder outputs.
    """
    engine = bench(max_loras=4)
    seen = {}
    picture = image(1, 2, 3)
    for name, own in {
        "plain": None,
        "one": adapter(1),
        "renamed": Adapter(bytes([1]) * 32, 10, False, "other"),
        "two": adapter(2),
        "visual": adapter(3, visual=True),
    }.items():
        engine.submit(request(name, list(range(12)), media=[picture], adapter=own))
        (event,) = (each for each in engine.run() if isinstance(each, ev.Admitted))
        seen[name] = len(event.cached_blocks) // 4, len(event.encode)
    assert seen == {"plain": (0, 1), "one": (0, 0), "renamed": (2, 0), "two": (0, 0), "visual": (0, 1)}
    tokens = {tuple(engine.tokens[name]) for name in seen}
    assert len(tokens) == 4, "one and renamed are the same"


def skewed(engine, rng, number, *, hot=0.95):
    """Submit and return a request, usually for a frequent adapter, sometimes for a rare adapter."""
    tag = rng.choice([1, 2]) if rng.random() < hot else rng.randint(3, 9)
    one = request(f"{number}", rng.randint(3, 9), max_tokens=rng.randint(1, 8), adapter=adapter(tag))
    engine.submit(one)
    return one


def worst_wait(seed, **settings):
    """Run 200 requests, with an arrival in each step. Return (longest wait in steps, engine, requests)."""
    rng = random.Random(seed)
    engine = bench(max_num_seqs=6, token_budget=32, **settings)
    came, worst, asked = {}, 0, []
    for number in range(200):
        asked.append(skewed(engine, rng, number))
        came[f"{number}"] = engine.state.step
        for name in admitted(engine.step()):
            worst = max(worst, engine.state.step - came[name])
    while engine.core.has_work:
        for name in admitted(engine.step()):
            worst = max(worst, engine.state.step - came[name])
    return worst, engine, asked


@pytest.mark.parametrize("seed", range(3))
def test_no_adapter_starves_beside_hot_ones(seed):
    worst, engine, asked = worst_wait(seed)
    theirs, _, _ = worst_wait(seed, compat="vllm")
    print(f"longest wait {worst} steps; under vLLM's rules {theirs}")
    assert worst < theirs
    assert len(engine.ends) == len(asked)
    for one in asked[::7]:
        assert engine.tokens[one.request_id] == reference_tokens(one, engine.config)[0]


def steps_until_cold(seed, hot=2, **settings):
    """Return the number of steps until a request for a rare adapter starts, at most 200. Meanwhile, a request
    for a frequent adapter arrives in each step. `hot`: the number of frequent adapters.
    """
    rng = random.Random(seed)
    places, room = rng.choice([1, 2]), rng.choice([20, 100])
    engine = bench(**{"max_num_seqs": 4, "max_loras": places, "lora_bytes": room} | settings)
    for number in range(12):
        tokens, own = rng.randint(2, MOST), adapter(1 + number % hot)
        engine.submit(request(f"hot {number}", 3, max_tokens=tokens, adapter=own))
    engine.step()
    engine.submit(request("cold", 3, max_tokens=2, adapter=adapter(7)))
    for step in range(200):
        tokens, own = rng.randint(2, MOST), adapter(1 + step % hot)
        engine.submit(request(f"new {step}", 3, max_tokens=tokens, adapter=own))
        if "cold" in admitted(engine.step()):
            return step
    return 200


@pytest.mark.parametrize("seed", range(6))
def test_a_request_waits_at_most_for_earlier_requests_and_a_place(seed):
    # `before` counts earlier requests, and requests that may overtake the request for the rare adapter. In
    # the worst case, all these requests run in turn.
    before = 12 + 4
    assert steps_until_cold(seed) <= (before + 1) * (MOST + 1)
    assert steps_until_cold(seed, 1, max_loras=1, max_num_seqs=8) <= (before + 5) * (MOST + 1)
    alone = {"max_loras": 1, "max_num_seqs": 8}
    assert steps_until_cold(seed, 1, **alone, compat="vllm") == 200, "under vLLM's rules it never starts"


def test_step_cost_is_not_quadratic_in_waiting_adapters(monkeypatch):
    summed = []

    def counted(values):
        summed.append(len(values := list(values)))
        return sum(values)

    monkeypatch.setattr(adapter_places, "sum", counted, raising=False)
    engine = bench(lora_bytes=5000, max_waiting=300)
    engine.submit(*(request(f"{tag}", 5, max_tokens=9, adapter=adapter(tag)) for tag in range(200)))
    engine.step()
    summed.clear()
    engine.step()
    assert sum(summed) <= 200


def test_a_place_is_given_back_when_a_row_leaves():
    engine = bench()
    engine.submit(request("a", 5, max_tokens=9, adapter=adapter(1)), request("b", 5, adapter=adapter(2)))
    engine.step()
    engine.core.cancel("a")
    engine.submit(request("c", 5, adapter=adapter(3)))
    engine.run()
    assert engine.ends["c"][0] == "length" and not engine.state.adapters.of_row
    assert engine.state.adapters.num_held == 0 and np.all(engine.state.block_table == 0)
