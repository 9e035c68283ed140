"""Tests logs that begin while requests run: the ring in memory, and a log that continues in new folders."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from tests.vllm.fake_scheduler import FakeRequest, run_output
from tests.vllm.test_vllm_recorder import Recorded, folded, of_type, record  # noqa: F401


def some_requests(first, count, rng):
    place = SimpleNamespace(offset=1, length=4, is_embed=None)
    for number in range(first, first + count):
        item = SimpleNamespace(identifier=f"item {rng.integers(6)}", modality="image", mm_position=place)
        prompt = [1, 9, 9, 9, 9, *rng.integers(0, 50, rng.integers(1, 12)).tolist()]
        yield FakeRequest(f"r{number}", prompt, int(rng.integers(3, 14)), mm_features=(item,))


def drive(scheduler, num_steps, *, seed=1, first=0, evicts=False):
    """Run steps with arrivals. An overlapping scheduler keeps one step in flight."""
    rng, number, flying = np.random.default_rng(seed), first, []
    overlaps = scheduler.scheduler_config.async_scheduling
    for _ in range(num_steps):
        for request in some_requests(number, int(rng.integers(2)), rng):
            scheduler.add_request(request)
            number += 1
        if evicts and rng.integers(4) == 0:
            running = {item.identifier for request in scheduler.running for item in request.mm_features}
            idle = sorted(scheduler.encoded - running)
            scheduler.encoded.difference_update(idle[:1])
            scheduler.freed += idle[:1]
        flying.append(scheduler.schedule())
        if len(flying) > overlaps:
            output = flying.pop(0)
            scheduler.update_from_output(output, run_output(output, lambda name: 5))
    for output in flying:
        scheduler.update_from_output(output, run_output(output, lambda name: 5))
    return number


def live_facts(scheduler):
    """Return each running request's id, number of tokens, and blocks, sorted by id."""
    return sorted((r.request_id, len(r.tokens), r.blocks) for r in scheduler.running)


def state_facts(state):
    found = []
    for row in state.running.tolist():
        name = state.requests_by_row[row].request.request_id
        blocks = state.block_table[row, : state.num_blocks[row]].tolist()
        found.append((name, int(state.num_tokens[row]), blocks))
    return sorted(found)


@pytest.fixture
def ring(record, monkeypatch):  # noqa: F811
    """Return a function that makes a scheduler with a ring. The ring stores the scheduler's state at each
    update, so a log can begin at any update.
    """
    monkeypatch.setenv("MMENGINE_LOG_RING_SECONDS", "0.000001")
    before = signal.getsignal(signal.SIGUSR1)
    yield record
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("num_steps", [5, 23, 60])
def test_a_dump_begins_with_the_state_of_the_scheduler(ring, tmp_path, num_steps):
    scheduler = ring(num_blocks=24)
    drive(scheduler, num_steps, evicts=True)
    scheduler._recording.dump("a test")
    events, state = folded(tmp_path / "log")
    assert state_facts(state) == live_facts(scheduler)
    assert set(state.requests) == set(scheduler.requests)
    assert events[0].fingerprints["dumped"] == "a test"
    drive(scheduler, 30, seed=2, first=100, evicts=True)
    scheduler._recording.dump("again")
    _, state = folded(tmp_path / "log-2")
    assert state_facts(state) == live_facts(scheduler)


def test_a_ring_that_covers_a_long_time_holds_everything(record, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MMENGINE_LOG_RING_SECONDS", "600")
    scheduler = record()
    drive(scheduler, 20)
    assert not (tmp_path / "log").exists()
    scheduler._recording.dump("a test")
    events, _ = folded(tmp_path / "log")
    assert "not_derived" not in events[0].fingerprints and of_type(events, ev.Queued)


@pytest.mark.parametrize("stays", [True, False], ids=["running", "shutdown"])
def test_a_signal_dumps_the_ring_and_calls_the_handler_that_was_there(ring, tmp_path, stays):
    """The ring is dumped even if the scheduler is shut down right after the signal."""
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    scheduler = ring()
    drive(scheduler, 9)
    os.kill(os.getpid(), signal.SIGUSR1)
    if stays:
        for _ in range(1200):
            if list(tmp_path.glob("log/*.mmlog")):
                break
            time.sleep(0.05)
        assert list(tmp_path.glob("log/*.mmlog"))
    scheduler.shutdown()
    assert seen == [signal.SIGUSR1]
    events, _ = folded(tmp_path / "log")
    assert events[0].fingerprints["dumped"] == "SIGUSR1"


def test_an_exception_of_vllm_dumps_the_ring_and_goes_on(ring, tmp_path, monkeypatch):
    scheduler = ring()
    drive(scheduler, 9)
    monkeypatch.setattr(scheduler, "running", None)
    with pytest.raises(TypeError):
        scheduler.schedule()
    last = list(LogReader(tmp_path / "log"))[-1].event
    assert isinstance(last, ev.Noted) and last.kind == "exception" and "TypeError" in last.detail


def test_a_stall_is_reported_once(record, tmp_path, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setenv("MMENGINE_STALL_SECONDS", "0.3")
    scheduler = record()
    scheduler.add_request(FakeRequest("a", [1, 2, 3], 4))
    for _ in range(100):
        if "no token for 0.3 seconds" in caplog.text:
            break
        time.sleep(0.05)
    scheduler.shutdown()
    notes = of_type(folded(tmp_path / "log")[0], ev.Noted)
    assert notes[0].kind == "stall" and "0 requests run and 1 wait" in notes[0].detail


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_log_with_a_limit_goes_on_in_new_folders(record, tmp_path, monkeypatch, overlaps):  # noqa: F811
    monkeypatch.setenv("MMENGINE_LOG_BYTES", "20000")
    scheduler = record(num_blocks=24, overlaps=overlaps)
    drive(scheduler, 500, evicts=True)
    scheduler.shutdown()
    folders = sorted(tmp_path.glob("log*"), key=lambda folder: folder.stat().st_mtime_ns)
    assert len(folders) == 2 and not (tmp_path / "log").exists()
    _, state = folded(folders[-1])
    assert state_facts(state) == live_facts(scheduler)
    assert set(state.requests) == set(scheduler.requests)
