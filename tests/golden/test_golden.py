"""Logs of old builds: they read, fold to what they folded to, and verify, for ever."""

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mmengine.config import EngineConfig
from mmengine.core.decide.schedule import COMPAT_DECIDED_VERSIONS, decides
from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import codec, format_1
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import FOOTER_SIZE, HEADER_SIZE, snapshot_sequences
from mmengine.replay import request_lines, step_lines, verify
from tests.golden.make_golden import crashed_run

HERE = Path(__file__).parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/expected.json"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def golden(request):
    return request.param, json.loads((request.param / "expected.json").read_text())


def test_there_is_one_for_each_format_and_for_the_rules_since():
    assert [folder.name for folder in FOLDERS] == [
        *("adapters_rules_4_format_3", "compat_rules_4_format_3", "compat_rules_5_format_3"),
        *("format_1", "format_2", "format_3", "rules_2_format_2", "rules_3_format_2"),
        *("rules_4_format_3", "schema_3_format_3", "sessions_rules_4_format_3"),
        *("slots_rules_4_format_3", "store_rules_4_format_3"),
    ]
    assert sum(path.stat().st_size for folder in FOLDERS for path in folder.iterdir()) < 735_000


def test_the_log_of_schema_3_has_a_grammar_once():
    events = [record.event for record in LogReader(HERE / "schema_3_format_3")]
    slots = [(event.grammar_slot, bool(event.grammar.source)) for event in events if is_bound(event)]
    assert events[0].schema == 3
    assert [each for each in slots if each[0] != ev.NO_SLOT] == [(0, True), (0, False), (0, False)]


def is_bound(event):
    return isinstance(event, ev.Queued) and event.grammar is not None


def config_of(folder):
    return EngineConfig.from_dict(next(iter(LogReader(folder))).event.config)


def test_each_of_vllms_rules_decides_something_in_their_logs(tmp_path):
    versions = []
    for folder in FOLDERS:
        records = list(LogReader(folder))
        started = records[0].event
        if not config_of(folder).compat:
            continue
        versions.append(started.decision_version)
        for version in COMPAT_DECIDED_VERSIONS:
            told = tmp_path / f"{started.decision_version} as {version}"
            with closing(LogWriter(told)) as writer:
                writer.append(msgspec.structs.replace(started, decision_version=version), 0, 0)
                for record in records[1:]:
                    writer.append(record.event, record.step, record.mono_ns)
            divergence = verify(told).divergence
            if version == started.decision_version:
                assert divergence is None
            else:
                assert divergence.sequence < len(records) // 2
    assert versions == list(COMPAT_DECIDED_VERSIONS)


# What the logs of runs of their own have in them, beside what any run has.
OF_THEIR_OWN = {
    "sessions": {ev.SessionOpened, ev.Appended, ev.Leased, ev.LeaseTaken, ev.SessionClosed},
    "store": {ev.Offered, ev.Fetched, ev.Arrived, ev.Lost},
}


def test_it_has_everything_in_it(golden):
    events = [record.event for record in LogReader(golden[0])]
    if own := OF_THEIR_OWN.get(golden[0].name.partition("_")[0]):
        assert {type(event) for event in events} >= own
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


def test_it_folds_to_its_digest(golden):
    folder, expected = golden
    state = None
    for record in LogReader(folder):
        if state is None:
            state = State(EngineConfig.from_dict(record.event.config))
        evolve(state, record.event)
    assert state_digest(state).hex() == expected["digest"]


def test_it_verifies(golden):
    folder, expected = golden
    report = verify(folder)
    assert report.ok and report.torn is None and not report.unfinished
    assert report.rederived == decides(config_of(folder), expected["decision_version"])
    assert {name: getattr(report, name) for name in ("events", "steps", "tokens", "checkpoints")} == {
        name: expected[name] for name in ("events", "steps", "tokens", "checkpoints")
    }


def test_its_snapshots_are_read(golden):
    folder, expected = golden
    sequences = snapshot_sequences(folder)
    assert bool(sequences) == (expected["decision_version"] > 1)
    for sequence in sequences:
        report = verify(folder, after=sequence + 1)
        assert report.ok and report.begins_after == sequence


def test_it_shows_the_same_figures(golden):
    folder, expected = golden
    lines = [asdict(line) for line in request_lines(folder)]
    assert len(lines) == len(expected["requests"])
    for line, known in zip(lines, expected["requests"], strict=True):
        assert {name: line[name] for name in known} == known
    steps = [list(asdict(line).values()) for line in step_lines(folder)]
    known = expected["step_lines"]
    assert [step[: len(old)] for step, old in zip(steps, known, strict=True)] == known


def test_a_model_without_states_writes_the_bytes_that_it_wrote_before_there_were_any(tmp_path):
    """The run behind the log of rules 4, done again: but for the settings in STARTED, to which some came, and
    for the grids of its videos, which have a frame for each run since."""
    crashed_run(tmp_path, 24)
    found, wanted = (list(LogReader(folder)) for folder in (tmp_path, HERE / "rules_4_format_3"))
    assert len(found) == len(wanted)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert mine.step == theirs.step and bytes_of(mine.event) == bytes_of(theirs.event)


def bytes_of(event):
    if isinstance(event, ev.Queued):
        media = tuple(msgspec.structs.replace(item, grid=()) for item in event.media)
        event = msgspec.structs.replace(event, media=media)
    return type(event), msgspec.msgpack.encode(event)


def test_a_log_with_slots_goes_on_from_states_that_were_kept():
    events = [record.event for record in LogReader(HERE / "slots_rules_4_format_3")]
    admitted = [event for event in events if isinstance(event, ev.AdmittedWithState)]
    hits = [event for event in admitted if event.state_from != ev.NO_STATE]
    assert hits and all(event.cached_blocks for event in hits)
    assert any(event.num_shared and event.state_from == ev.NO_STATE for event in admitted)
    kept = [slot for event in events if isinstance(event, ev.StatesKept) for slot in slots_of(event)]
    assert len(kept) > 2 * len(set(kept)), "they give way to one another"


def slots_of(event):
    return np.frombuffer(event.slots, np.int32).tolist()


# What QUEUED said of a grammar up to schema 2, and says since.
GRAMMARS = {
    "grammar": ["", "grammar", [], "length"],
    '{"type":"regex","regex":"a","on_truncation":"close"}': ["regex", "a", [], "close"],
}


def in_todays_words(event, fields):
    if isinstance(event, ev.Queued) and isinstance(fields[8], str):
        return [*fields[:8], GRAMMARS[fields[8]], *fields[9:]]
    return fields


def extends(new, old):
    """Whether a body only gained something: fields at the end of an array, keys of a map."""
    if isinstance(old, list):
        return len(new) >= len(old) and all(map(extends, new, old))
    if isinstance(old, dict):
        return all(name in new and extends(new[name], old[name]) for name in old)
    return new == old and type(new) is type(old)


def bodies_of(path, fmt):
    """Bodies of a segment as they stand there, in order."""
    data, decode = path.read_bytes(), msgspec.msgpack.Decoder().decode
    if fmt == 1:
        offset = 0
        while offset < len(data):
            start = offset + format_1.HEADER.size
            offset = start + format_1.HEADER.unpack_from(data, offset)[4]
            yield decode(data[start:offset])
    else:
        offset = HEADER_SIZE
        while offset < len(data) - FOOTER_SIZE:
            start = offset + codec.HEADER.size
            offset = start + codec.HEADER.unpack_from(data, offset)[2]
            yield from (fields for _, _, _, fields in decode(data[start:offset]))


def test_what_is_written_today_only_adds_to_it(golden):
    folder, _ = golden
    (path,) = folder.glob("*.mmlog")
    bodies = list(bodies_of(path, int(folder.name[-1])))
    events = [record.event for record in LogReader(folder)]
    for event, old in zip(events, bodies, strict=True):
        today = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
        assert extends(today, in_todays_words(event, old))
