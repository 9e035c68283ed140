"""Tests that a media item that exceeds a step's encoder limit is encoded in parts over several steps, while
other requests continue.
"""

import pytest

from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import snapshot
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.encoder_cache.work import work_of
from mmengine.errors import ExecutorFailed
from mmengine.events import vocabulary as ev
from mmengine.request import MediaItem
from mmengine.simulation.simulated_executor import SimulatedExecutor, reference_tokens
from tests.core.small_engine import Bench, image, ints, request

PIECE = {"encoder_piece": 5, "encoder_even_patches": 16}


def large(tag: int, start: int, size: int = 4) -> MediaItem:
    """Return an image with 32 units of encoder work, which is encoded in 7 parts."""
    return MediaItem(bytes([tag, size]).ljust(32, b"\2"), "image", ((start, size),), (1, 4, 4))


def parts(events):
    return [(event.request_id, event.until) for event in events if isinstance(event, ev.Encoded)]


def test_work_grows_with_the_square_of_a_frame():
    assert work_of((1, 4, 4), 16) == 32
    assert work_of((3, 4, 4), 16) == 96
    assert work_of((1, 8, 8), 16) == 64 + 256
    assert work_of((1, 216, 216), 6144) == 46656 + 46656**2 // 6144


@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_request_alone_is_answered(start):
    """The item begins at the prompt's first token, or after a first chunk of text."""
    bench = Bench(**PIECE)
    asked = request("a", 12, media=[large(1, start)])
    bench.submit(asked)
    events = bench.run()
    assert parts(events) == [("a", until) for until in (5, 10, 15, 20, 25, 30, 32)]
    assert bench.tokens["a"] == reference_tokens(asked, bench.config)[0]
    assert bench.core.stats().num_encoded_items == 1


def test_others_decode_in_each_step_of_it_and_small_items_pass():
    bench = Bench(**PIECE)
    bench.submit(request("text", 4, max_tokens=30))
    bench.step()
    bench.submit(request("large", 12, media=[large(1, 2)]))
    bench.step()
    bench.submit(request("small", 9, max_tokens=2, media=[image(2, 1, 4)]))
    while "large" not in bench.tokens:
        before = len(bench.tokens["text"])
        bench.step()
        assert len(bench.tokens["text"]) == before + 1
    assert bench.ends["small"][0] == "length"  # it did not wait for the large item


def test_whole_items_of_a_step_share_its_work():
    """An image needs 5 units, as many as a step may use. Each step therefore encodes a single image."""
    bench = Bench(**PIECE)
    bench.submit(request("a", 20, media=[image(tag, 2 + 5 * tag, 4) for tag in range(3)]))
    encoded = [len(event.encode) for event in bench.run() if hasattr(event, "encode") and event.encode]
    assert encoded == [1, 1, 1]


def test_items_are_encoded_one_at_a_time():
    bench = Bench(**PIECE)
    bench.submit(request("a", 12, media=[large(1, 2)]), request("b", 12, media=[large(2, 2)]))
    assert [name for name, _ in parts(bench.run())] == ["a"] * 7 + ["b"] * 7


def test_the_same_item_of_several_requests_is_encoded_once():
    bench = Bench(**PIECE)
    bench.submit(*(request(name, 12, media=[large(1, 2)]) for name in "abc"))
    assert parts(bench.run())[-1] == ("a", 32)
    assert bench.core.stats().num_encoded_items == 1 and len(bench.ends) == 3


def test_an_abort_drops_the_computed_part_and_tells_the_executor():
    bench = Bench(**PIECE)
    bench.submit(request("text", 4, max_tokens=9), request("a", 12, media=[large(1, 2)]))
    bench.step(), bench.step()
    assert bench.state.part is not None and bench.state.num_large == 1
    bench.core.cancel("a")
    bench.run()
    assert bench.ends["a"][0] == "abort" and bench.state.part is None and bench.state.num_large == 0
    assert bench.executor._part is None


def test_another_request_continues_the_same_item():
    bench = Bench(**PIECE)
    bench.submit(request("a", 12, media=[large(1, 2)]), request("b", 12, media=[large(1, 2)]))
    bench.step(), bench.step()
    bench.core.cancel("a")
    assert parts(bench.run()) == [("b", until) for until in (15, 20, 25, 30, 32)]


def test_a_preempted_request_keeps_its_computed_part():
    """The decoding row needs the last free block, so request a is preempted. No part is encoded twice."""
    bench = Bench(**PIECE, num_blocks=6, max_model_len=20, enable_prefix_caching=False)
    bench.submit(request("text", 6, max_tokens=12), request("a", 10, max_tokens=2, media=[large(1, 5)]))
    events = bench.run()
    assert any(isinstance(event, ev.Preempted) and event.request_id == "a" for event in events)
    assert [until for _, until in parts(events)] == [5, 10, 15, 20, 25, 30, 32]


def test_a_failed_step_begins_it_again():
    fails = {3}
    bench = Bench(**PIECE, fault=lambda step: "planted" if step in fails else None)
    asked = request("a", 12, media=[large(1, 2)])
    bench.submit(asked)
    assert [until for _, until in parts(bench.run())] == [5, 10, 15, 20, 5, 10, 15, 20, 25, 30, 32]
    assert bench.tokens["a"] == reference_tokens(asked, bench.config)[0]


class Refusing(SimulatedExecutor):
    """Fails each step that encodes a part of an item whose hash begins with 9."""

    def collect(self):
        plan = self._plans[0]
        if plan.part is not None and plan.part.item.key[0] == 9:
            self._plans.popleft()
            raise ExecutorFailed("planted")
        return super().collect()


@pytest.mark.parametrize("start", [0, 2])
def test_an_item_that_brings_its_steps_down_is_found(start):
    """The failing request has a row (`start` 2) or waits (`start` 0). All other requests are answered."""
    settings = Bench(**PIECE).config
    bench = Bench(**PIECE, executor=Refusing(settings, check_kv=True))
    others = [request("text", 5, max_tokens=6), request("b", 12, media=[large(1, 3)])]
    bench.submit(others[0], request("bad", 12, media=[large(9, start)]), others[1])
    bench.run()
    assert bench.ends["bad"] == ("error", "planted")
    for other in others:
        assert bench.tokens[other.request_id] == reference_tokens(other, bench.config)[0]
    assert not bench.state.suspects


def test_two_failing_items_delay_no_other_request():
    settings = Bench(**PIECE).config
    bench = Bench(**PIECE, executor=Refusing(settings, check_kv=True))
    bench.submit(*(request(name, 12, media=[large(9, start)]) for name, start in (("x", 2), ("y", 3))))
    bench.submit(request("text", 5), request("late", 5))
    bench.run()
    assert {name: end[0] for name, end in bench.ends.items()} == {
        "x": "error", "y": "error", "text": "length", "late": "length"
    }  # fmt: skip


def test_features_find_room_when_others_let_go():
    """The large item waits until the other row releases its embeddings in the encoder cache."""
    bench = Bench(**PIECE, encoder_cache_size=6, encoder_budget=6, token_budget=4)
    bench.submit(request("a", 12, media=[image(3, 2, 4)]), request("b", 12, media=[large(1, 2, 5)]))
    bench.run()
    assert {end[0] for end in bench.ends.values()} == {"length"}


def test_two_steps_in_flight_compute_consecutive_parts():
    bench = Bench(**PIECE, max_in_flight=2)
    bench.submit(request("text", 4, max_tokens=9), request("a", 12, media=[large(1, 2)]))
    events = bench.run()
    assert [until for _, until in parts(events)] == [5, 10, 15, 20, 25, 30, 32]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_snapshot_in_the_middle_of_an_item_goes_on_alike(in_flight):
    bench = Bench(**PIECE, max_in_flight=in_flight)
    bench.submit(request("text", 4, max_tokens=20), request("a", 12, media=[large(1, 2)]))
    for _ in range(4):
        bench.step()
    assert bench.state.part is not None
    records = list(bench.log.records)
    restored, _ = snapshot.restore(bench.core.snapshot(len(records) - 1))
    assert (restored.part, restored.step_part) == (bench.state.part, bench.state.step_part)
    assert restored.num_large == 1
    bench.run()
    for record in list(bench.log.records)[len(records) :]:
        evolve(restored, record.event)
    assert state_digest(restored) == state_digest(bench.state)


def test_a_recovered_engine_begins_the_item_again():
    bench = Bench(**PIECE)
    bench.submit(request("a", 12, media=[large(1, 2)]))
    bench.step(), bench.step(), bench.step()
    bench.core.recover(ev.Recovered())
    assert bench.state.part is None
    bench.core._dispatched.forget()
    assert [until for _, until in parts(bench.run())] == [5, 10, 15, 20, 25, 30, 32]


def test_the_digest_covers_the_progress_of_an_item_in_parts():
    bench = Bench(**PIECE)
    bench.submit(request("a", 12, media=[large(1, 2)]))
    bench.step()
    before = state_digest(bench.state)
    bench.state.part = bench.state.part._replace(until=6)
    assert state_digest(bench.state) != before
    plain = State(Bench().config)
    before = state_digest(plain)
    plain.num_large = 3
    assert state_digest(plain) == before


def test_a_step_of_a_part_alone_has_no_rows():
    # The prompt begins with the image, so the first step only encodes a part, and the request has no row.
    bench = Bench(**PIECE)
    bench.submit(request("a", 12, media=[large(1, 0)]))
    first = bench.step()
    assert [type(event) for event in first] == [ev.Queued, ev.Encoded]
    assert ints(bench.state.step_rows.astype("i4").tobytes()) == []
