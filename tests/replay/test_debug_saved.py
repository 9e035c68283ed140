"""Tests the debugger's saved states. The states equal a plain fold (the log's events applied in order), store
each request only once, and stay within the memory limit.
"""

import gc
import itertools
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mmengine.core.snapshot.saving import known_of
from mmengine.core.state.digest import state_digest
from mmengine.core.state.grammar_slots import GrammarSlots
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog
from mmengine.events import vocabulary as ev
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.debug import navigator, open_debugger
from mmengine.replay.debug.saved import request_table
from mmengine.replay.debug.saved.live_requests import LiveRequests
from mmengine.replay.debug.saved.packed_state import PackedState
from mmengine.replay.debug.saved.request_table import Chunk, RequestTable
from mmengine.replay.debug.state_diff import values_of
from mmengine.replay.timeline import fold
from tests.core.small_engine import settings_of
from tests.core.workloads import small_request
from tests.replay.runs import busy_run, session_run

TESTS = Path(__file__).parents[1]
VLLM = [
    TESTS / "replay/recordings/vllm_032_priority",
    TESTS / "replay/recordings/vllm_033_async_priority",
    TESTS / "replay/recordings/vllm_033_async_eagle",
    TESTS / "vllm/recordings/block_groups",
    TESTS / "vllm/recordings/asynchronous_block_groups",
]
RUNS = {
    "mixed": {"mixed": True},
    "swapped": {"seed": 1, "swap_blocks": 12},
    "long queue": {"seed": 2, "max_waiting": 1000, "num_requests": 80},
    "adapters": {"seed": 3, "max_loras": 2},
    "overlapping": {"seed": 4, "max_in_flight": 2, "mixed": True},
    "drafts": {"seed": 5, "num_draft_tokens": 3},
}


def run_of(kind, folder):
    """Write a log of this kind, and return its folder."""
    if kind == "sessions":
        session_run(folder)
    else:
        busy_run(folder, **RUNS[kind])
    return folder


def read_to_end(folder, every=16, max_bytes=2**28):
    debugger = open_debugger(folder, max_bytes=max_bytes)
    debugger.navigator.marks.every_records = every
    debugger.goto_end()
    return debugger.navigator


def folded(folder):
    """Return the state's digest and values before each record, from a plain fold."""
    return {
        record.sequence: (state_digest(state), values_of(state)) for state, record in fold(CheckedLog(folder))
    }


def check_marks(marks, expected):
    for mark in marks:
        state = mark.saved.restore()
        assert (state_digest(state), values_of(state)) == expected[mark.position], mark.position


@pytest.mark.parametrize("kind", [*RUNS, "sessions"])
def test_each_saved_state_equals_the_state_of_a_plain_fold(kind, tmp_path, monkeypatch):
    """The states are also equal after a reload from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(navigator, "MIN_RECORDS", 50)
    folder = run_of(kind, tmp_path / "log")
    read, expected = read_to_end(folder), folded(folder)
    assert len(read.marks.all) > 3 and all(isinstance(each.saved, PackedState) for each in read.marks.all)
    check_marks(read.marks.all, expected)
    read.keep()
    again = open_debugger(folder).navigator.marks
    assert len(again.all) == len(read.marks.all)
    check_marks(random.Random(0).sample(again.all, len(again.all)), expected)
    monkeypatch.setattr(request_table, "MAX_DECODED_BYTES", 0)
    check_marks(open_debugger(folder).navigator.marks.all, expected)


@pytest.mark.parametrize("folder", VLLM, ids=lambda folder: folder.name)
def test_the_states_of_a_vllm_log_are_packed(folder, tmp_path, monkeypatch):
    """Each saved state, and the 40 later states computed from it, equal the states of a plain fold."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(navigator, "MIN_RECORDS", 50)
    read, expected = read_to_end(folder, every=8), folded(folder)
    assert len(read.marks.all) > 5 and all(isinstance(each.saved, PackedState) for each in read.marks.all)
    read.keep()
    again = open_debugger(folder).navigator
    assert len(again.marks.all) == len(read.marks.all)
    check_marks(again.marks.all, expected)
    for mark in again.marks.all:
        again.go(again.first)
        for cursor in itertools.islice(again.walk(mark.position), 41):
            if cursor.record is not None:
                state = state_digest(cursor.state), values_of(cursor.state)
                assert state == expected[cursor.position], (mark.position, cursor.position)


def test_a_waiting_request_is_stored_once(tmp_path):
    """A state's size does not grow with its queue."""
    folder = run_of("long queue", tmp_path / "log")
    read = read_to_end(folder, every=8)
    packed = [mark.saved for mark in read.marks.all]
    queues = [len(each.restore().waiting) for each in packed]
    named = sum(len(read.marks.requests.numbers(each.live)) for each in packed)
    assert max(queues) > 35 and named > 20 * read.marks.requests.table._next / 3
    longest, shortest = (packed[place(queues)].num_bytes for place in (np.argmax, np.argmin))
    assert longest < 1.5 * shortest


def test_the_waiting_requests_of_another_state_object_are_found_in_the_table(tmp_path):
    """A restored state has new request objects. The table still finds the waiting requests. Running requests
    have changed since they were stored, so the table stores them again.
    """
    read = read_to_end(run_of("long queue", tmp_path / "log"))
    requests = read.marks.requests
    num_waiting = 0
    for mark in read.marks.all[::3]:
        state = mark.saved.restore()
        waits = [each.row < 0 for each in state.requests.values()]
        numbers = requests.numbers(requests.describe(state))
        assert (numbers == requests.numbers(mark.saved.live))[waits].all()
        num_waiting += sum(waits)
    assert num_waiting > 100


def test_the_limit_counts_requests_and_deletes_those_that_no_copy_needs(tmp_path):
    folder = run_of("long queue", tmp_path / "log")
    whole, expected = read_to_end(folder, every=8).marks, folded(folder)
    limit = whole.num_bytes // 3
    marks = read_to_end(folder, every=8, max_bytes=limit).marks
    assert marks.num_bytes <= limit and marks.every_records > 8 and len(marks.all) > 2
    table = marks.requests.table
    assert table.num_bytes < whole.requests.table.num_bytes
    actual = sum(len(each.data) + request_table.ENTRY_BYTES * each.count for each in table.chunks())
    assert table.num_bytes == actual, "the table counts its size correctly"
    check_marks(marks.all, expected)


def test_the_garbage_collector_is_as_before_a_restore(tmp_path):
    # A restore pauses garbage collection, and ends the pause even if the restore raises.
    saved = read_to_end(run_of("mixed", tmp_path / "log")).marks.last.saved
    damaged = PackedState(saved.data, b"", saved.requests, saved.base)
    try:
        for enable, is_enabled in ((gc.disable, False), (gc.enable, True)):
            enable()
            saved.restore()
            assert gc.isenabled() == is_enabled
            with pytest.raises(CorruptLog):
                damaged.restore()
            assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def stored(num_requests):
    """Return a table with random requests, the same requests in their stored form, and a state."""
    rng, state = random.Random(7), State(settings_of(max_model_len=48))
    state.constants = ev.FoldConstants()
    known = [
        known_of(state.new_request(small_request(rng, f"r{number}", state.config)), GrammarSlots())
        for number in range(num_requests)
    ]
    table = RequestTable()
    assert [table.add(each) for each in known] == list(range(num_requests))
    return table, known, state


def test_a_loaded_table_knows_its_requests():
    table, known, state = stored(150)
    loaded = RequestTable(table.chunks())
    assert [loaded.add(each) for each in known] == list(range(150))
    assert [each.request.request_id for each in loaded.take([149, 0, 64], state)] == ["r149", "r0", "r64"]
    one, other = loaded.take([3], state) + loaded.take([3], state)
    assert one is not other and one.held_media is not other.held_media and one.request is other.request
    loaded.drop_others(np.array([70]))
    assert loaded.take([70], state)[0].request.request_id == "r70"
    with pytest.raises(KeyError):
        loaded._decoded.clear()
        loaded.take([3], state)
    assert loaded.add(known[3]) >= 150, "a deleted request is stored again"


def test_damaged_requests_are_refused():
    table, _, state = stored(40)
    (chunk,) = table.chunks()
    rng = random.Random(1)
    for _ in range(60):
        data = bytearray(chunk.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        spoiled = RequestTable([Chunk(0, 40, bytes(data[: rng.choice((len(data), len(data) // 2))]))])
        with suppress(CorruptLog):
            spoiled.take(list(range(40)), state)
    with pytest.raises(CorruptLog, match="40 saved requests were found instead of 41"):
        RequestTable([Chunk(0, 41, chunk.data)]).take([0], state)
    with pytest.raises(CorruptLog, match="cannot be unpacked"):
        LiveRequests(table, settings_of()).restore(b"\x28\xb5\x2f\xfd", state)
