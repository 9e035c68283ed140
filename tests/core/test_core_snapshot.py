"""Tests that a snapshot restores the state after any event. Later events lead to the same states as without a
snapshot.
"""

import random

import pytest
from msgspec.structs import replace

from mmengine.core.engine import EngineCore
from mmengine.core.fold.evolve import evolve
from mmengine.core.snapshot import body as snapshot_body
from mmengine.core.snapshot import snapshot
from mmengine.core.state.columns import COLUMNS, STATE_COLUMNS
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.errors import CorruptLog, QueueFull
from mmengine.events import vocabulary as ev
from mmengine.events.codec import as_logged
from mmengine.events.log import MemoryLog
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.workloads import ADAPTERS, small_config, small_request

# Fields of State besides the columns and the fields in snapshot_body.PLAIN and snapshot_body.NAMES.
PARTS = {
    *("token_ids", "block_table", "requests_by_row", "free_rows", "running", "requests", "waiting"),
    *("goodput", "blocks", "encoder", "free_host_blocks", "flights", "leaving", "last_rows", "history"),
    *("grammar_slots", "windows", "num_groups", "has_lazy_windows"),
    *("part", "step_part", "work_left"),
    *("step_rows", "step_filled", "step_encoded", "step_evicted", "step_swapped", "step_copies"),
    *("step_fetched", "fetching"),  # derived from the requests
    *("stale", "stopped"),  # Used only in logs recorded in vLLM, whose states are never saved.
    *("states", "step_kept", "adapters", "sessions", "num_prefills", "tenants"),
    *(
        *("has_drafts", "verifies"),  # derived from the columns
        "num_large",  # derived from the requests
        *("made_room_for", "constants"),
        "config",
        "policy",
        "block_size",
        "content_width",
        "suspects",
        "block_tokens",
        "due_places",
    ),
}


def random_run(seed):
    """Return the settings and the events of a random run with many kinds of events."""
    rng = random.Random(seed)
    config = small_config(rng)
    if seed % 2 and not config.compat:
        config = type(config)(**{**config.as_dict(), "max_in_flight": 2})
    log = MemoryLog()
    executor = SimulatedExecutor(
        config, eos_in=20, fault=lambda step: "planted" if rng.random() < 0.06 else None
    )
    core = EngineCore(config, executor, sink=log)
    last = None
    for number in range(14):
        last = small_request(rng, f"r{number}", config, grammars=0.2, like=last)
        try:
            core.submit(last)
        except QueueFull:
            pass
        else:
            if last.grammar is not None:
                core.inbox.put(ev.GrammarReady(last.request_id))
        if rng.random() < 0.2:
            core.cancel(f"r{rng.randrange(number + 1)}")
        if config.max_loras and number % 3 == 0:
            core.inbox.put(ev.AdapterLoaded(replace(ADAPTERS[1 + number // 3 % 3], name="one"), f"{number}"))
        if rng.random() < 0.1:
            core.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        for _ in range(rng.randrange(4)):
            core.step()
    while core.has_work:
        core.step()
    return config, [record.event for record in log.records]


def fold(state, events):
    digests = []
    for event in events:
        evolve(state, event)
        digests.append(state_digest(state))
    return digests


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_replay_from_any_event_equals_replay_from_zero(seed):
    config, events = random_run(seed)
    state, digests, parts = State(config), [], []
    for sequence, event in enumerate(events):
        evolve(state, event)
        digests.append(state_digest(state))
        parts.append(snapshot.take(state, events[0], sequence))
    rng = random.Random(seed)
    for place, data in enumerate(parts):
        state, body = snapshot.restore(data)
        assert body.sequence == place and body.started == as_logged(events[0])
        assert state_digest(state) == digests[place]
        assert snapshot.take(state, events[0], place) == data
        if rng.random() < 0.05 or place == 0:
            assert fold(state, events[place + 1 :]) == digests[place + 1 :]


def test_every_field_of_a_state_is_kept():
    config, _ = random_run(0)
    kept = {*snapshot_body.PLAIN, *snapshot_body.NAMES, *COLUMNS, *STATE_COLUMNS, *PARTS}
    assert set(vars(State(config))) == kept


def a_snapshot():
    config, events = random_run(3)
    state = State(config)
    for event in events[: len(events) // 2]:
        evolve(state, event)
    return snapshot.take(state, events[0], len(events) // 2 - 1)


def test_a_damaged_one_is_refused():
    data = a_snapshot()
    rng = random.Random(0)
    for length in [*range(60), *(rng.randrange(len(data)) for _ in range(200))]:
        with pytest.raises(CorruptLog):
            snapshot.restore(data[:length])
    for _ in range(300):
        place = rng.randrange(len(data))
        flipped = bytearray(data)
        flipped[place] ^= 1 << rng.randrange(8)
        if place in (6, 7):
            continue  # no check covers the header's reserved bytes
        with pytest.raises(CorruptLog):
            snapshot.restore(bytes(flipped))


def test_one_that_lies_under_a_right_checksum_is_refused():
    import msgspec

    # Each snapshot has a wrong value and a correct checksum.
    data = a_snapshot()
    body = msgspec.msgpack.decode(data[snapshot.HEADER.size :])
    lies = {
        "running": b"\xff\xff\xff\x7f",
        "free_rows": [0, 0],
        "waiting": ["nobody"],
        "history": b"x",
        "tokens": [[99, b"\0\0\0\0"]],
        "columns": {},
        "digest": b"\0" * 16,
        "encoder": [[b"k", 1, 0, True]],
    }
    for name, lie in lies.items():
        with pytest.raises(CorruptLog):
            snapshot.restore(packed({**body, name: lie}))
    started = body["started"]
    for settings in ({"max_num_seqs": 2**16, "max_model_len": 2**24}, {"num_blocks": -1}, {"policy": "none"}):
        config = {**started[3], **settings}
        with pytest.raises(CorruptLog):
            snapshot.restore(packed({**body, "started": [*started[:3], config, *started[4:]]}))


def packed(body):
    import zlib

    import msgspec

    data = msgspec.msgpack.encode(body)
    return snapshot.HEADER.pack(snapshot.MAGIC, snapshot.VERSION, 0, len(data), zlib.crc32(data)) + data


def test_a_snapshot_of_a_build_before_the_first_release_is_refused():
    with pytest.raises(CorruptLog, match="written before 0.1.0"):
        snapshot.restore(b"MMSN" + bytes(100))
