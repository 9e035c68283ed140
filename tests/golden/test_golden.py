"""Tests that this build reads the golden logs, and derives the same digests and decisions."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.events.segment import snapshot_sequences
from mmengine.replay import request_lines, step_lines, verify

HERE = Path(__file__).parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/expected.json"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def golden(request):
    return request.param, json.loads((request.param / "expected.json").read_text())


def test_there_is_one_log_for_each_feature():
    names = ["adapters", "compat", "mixed", "recurrent_states", "sessions", "store"]
    assert [folder.name for folder in FOLDERS] == names
    assert sum(path.stat().st_size for folder in FOLDERS for path in folder.iterdir()) < 400_000


def test_the_mixed_log_writes_a_shared_grammar_once():
    events = [record.event for record in LogReader(HERE / "mixed")]
    with_grammar = [event for event in events if isinstance(event, ev.Queued) and event.grammar is not None]
    slots = [(event.grammar_slot, bool(event.grammar.source)) for event in with_grammar]
    assert [each for each in slots if each[0] != ev.NO_SLOT] == [(0, True), (0, False)]


def config_of(folder):
    return EngineConfig.from_dict(next(iter(LogReader(folder))).event.config)


# Maps a golden log to the event types that it must contain.
EVENTS_OF = {
    "sessions": {ev.SessionOpened, ev.Appended, ev.Leased, ev.LeaseTaken, ev.SessionClosed},
    "store": {ev.Offered, ev.Fetched, ev.Arrived, ev.Lost},
}


def test_the_log_holds_every_event_of_its_feature(golden):
    events = [record.event for record in LogReader(golden[0])]
    if wanted := EVENTS_OF.get(golden[0].name):
        assert {type(event) for event in events} >= wanted
        return
    wanted = {cls for number, cls in ev.TYPES.items() if number <= 12}
    if config_of(golden[0]).num_state_slots:
        wanted = wanted - {ev.Admitted} | {ev.AdmittedWithState, ev.StatesKept}
    if config_of(golden[0]).max_loras:
        wanted |= {ev.AdmittedWithAdapter, ev.AdapterLoaded, ev.AdapterUnloaded}
    assert {type(event) for event in events} >= wanted
    reasons = {event.reason for event in events if isinstance(event, (ev.Preempted, ev.Finished))}
    assert reasons >= {"no free blocks", "the step failed", "stop", "length", "abort", "error", "rejected"}
    modalities = {item.modality for event in events if isinstance(event, ev.Queued) for item in event.media}
    assert modalities == {"image", "video"}
    assert len({event.priority for event in events if isinstance(event, ev.Queued)}) > 1


def test_the_log_folds_to_its_digest(golden):
    folder, expected = golden
    state = State(config_of(folder))
    for record in LogReader(folder):
        evolve(state, record.event)
    assert state_digest(state).hex() == expected["digest"]


def test_the_log_verifies(golden):
    folder, expected = golden
    report = verify(folder)
    assert report.ok and report.rederived and report.torn is None and not report.unfinished
    assert {name: getattr(report, name) for name in ("events", "steps", "tokens", "checkpoints")} == {
        name: expected[name] for name in ("events", "steps", "tokens", "checkpoints")
    }


def test_the_log_keeps_all_invariants(golden):
    report = verify(golden[0], invariants=True)
    assert report.ok, report.divergence


def test_the_snapshot_is_read(golden):
    (sequence,) = snapshot_sequences(golden[0])
    report = verify(golden[0], after=sequence + 1)
    assert report.ok and report.begins_after == sequence


def test_show_prints_the_same_lines(golden):
    folder, expected = golden
    lines = [asdict(line) for line in request_lines(folder)]
    assert len(lines) == len(expected["requests"])
    for line, known in zip(lines, expected["requests"], strict=True):
        assert {name: line[name] for name in known} == known
    steps = [list(asdict(line).values()) for line in step_lines(folder)]
    assert steps == expected["step_lines"]


def test_a_log_with_state_slots_continues_from_kept_states():
    events = [record.event for record in LogReader(HERE / "recurrent_states")]
    admitted = [event for event in events if isinstance(event, ev.AdmittedWithState)]
    hits = [event for event in admitted if event.state_from != ev.NO_STATE]
    assert hits and all(event.cached_blocks for event in hits)
    assert any(event.num_shared and event.state_from == ev.NO_STATE for event in admitted)
    kept = [slot for event in events if isinstance(event, ev.StatesKept) for slot in slots_of(event)]
    assert len(kept) > 2 * len(set(kept)), "kept states evict one another"


def slots_of(event):
    return np.frombuffer(event.slots, np.int32).tolist()
