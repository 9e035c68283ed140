"""Tests that step_cost.py builds the intended engine states. Times are not checked."""

import json
import sys
from collections import defaultdict

import numpy as np
import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader

PHASES = {"schedule", "evolve", "append", "batch", "complete"}


@pytest.fixture
def engine(module):
    return module("core.step_cost_engine")


def events_of(folder):
    """Return the events in the only log in `folder`."""
    (log,) = folder.iterdir()
    return [record.event for record in LogReader(log)]


def num_new(event):
    return len(event.new_blocks) // 4


def test_every_phase_of_every_step_is_clocked(engine, tmp_path):
    times = engine.decode(engine.Shape(3), tmp_path, 5)
    assert set(times) == {*PHASES, "core", "whole"}
    assert all(len(each) == 5 and min(each) > 0 for each in times.values())
    parts = zip(*(times[name] for name in PHASES - {"batch"}))
    assert times["core"] == [sum(part) for part in parts]


def test_a_step_costs_no_less_than_its_phases(engine, tmp_path):
    bench = engine._running(engine.Shape(3), tmp_path, 10)
    for _ in range(5):
        spent = defaultdict(int)
        with engine._phases(bench, spent):
            whole = bench.step()
        assert set(spent) == PHASES and sum(spent.values()) <= whole
    bench.close()


def test_rows_decode_one_token_each_at_places_of_their_own(engine, tmp_path):
    engine.decode(engine.Shape(4), tmp_path, 20)
    decoding = [event for event in events_of(tmp_path) if isinstance(event, ev.Scheduled)][-40:]
    assert all(event.rows is None and event.num_tokens is None for event in decoding)
    assert max(map(num_new, decoding)) == 1, "no two rows need a block in the same step"


def test_steps_are_decided_while_the_one_before_runs(engine, tmp_path):
    engine.decode(engine.Shape(4, max_in_flight=2), tmp_path, 10)
    kinds = [type(event) for event in events_of(tmp_path)][-30:]
    assert kinds.count(ev.Dispatched) >= 9
    assert (ev.Dispatched, ev.Executed, ev.Scheduled) in zip(kinds, kinds[1:], kinds[2:])


def test_rows_have_state_slots(engine, tmp_path):
    engine.decode(engine.Shape(4, slots=True), tmp_path, 10)
    admitted = [event for event in events_of(tmp_path) if isinstance(event, ev.Admitted)]
    assert len({event.state_slot for event in admitted}) == 4


def test_drafts_are_accepted_in_part(engine, tmp_path):
    engine.decode(engine.Shape(4, num_drafts=3), tmp_path, 10)
    executed = [event for event in events_of(tmp_path) if isinstance(event, ev.Executed)]
    assert set(np.frombuffer(executed[-1].counts, np.int32).tolist()) == {1, 2, 3, 4}
    assert np.frombuffer(executed[-1].num_drafts, np.int32).tolist() == [3] * 4


def test_all_rows_cross_a_boundary_in_one_step(engine, tmp_path):
    found = engine.boundary(4, tmp_path, 3)
    assert list(found) == ["all rows fill a block", "all rows need a block"]
    assert all(len(times["whole"]) == len(times["core"]) == 3 for times in found.values())
    scheduled = [event for event in events_of(tmp_path) if isinstance(event, ev.Scheduled)]
    assert set(map(num_new, scheduled)) == {0, 4}


def test_prompts_come_in_chunks_beside_rows_that_decode(engine, tmp_path):
    engine.decode(engine.Shape(3, prefill=True), tmp_path, 10)
    scheduled = [event for event in events_of(tmp_path) if isinstance(event, ev.Scheduled)]
    columns = [np.frombuffer(event.num_tokens, np.int32).tolist() for event in scheduled if event.num_tokens]
    assert [1, 1, 1, 256] in columns


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_storm_preempts(engine, tmp_path, mode):
    engine.storm(16, mode, tmp_path, 60)
    preempted = [event for event in events_of(tmp_path) if isinstance(event, ev.Preempted)]
    assert len(preempted) >= 8, "half of the rows, again and again"
    assert mode in {event.mode for event in preempted}


def test_a_storm_that_preempts_nobody_is_no_result(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine.Bench, "ask", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="no request was preempted"):
        engine.storm(4, "recompute", tmp_path, 2)


def test_percentiles_are_nearest_ranks(engine):
    assert [engine.percentile(range(1, 11), share) for share in (50, 99, 100)] == [5, 10, 10]
    assert engine.percentile([7], 50) == 7


def test_a_quick_run_ends_with_a_table_and_its_targets(module, engine, tmp_path, monkeypatch, capsys):
    step_cost, out = module("core.step_cost"), tmp_path / "table.md"
    busy, memory = step_cost._busy_cases, step_cost.memory
    monkeypatch.setattr(step_cost, "_busy_cases", lambda folder, steps: busy(folder, 30))
    monkeypatch.setattr(step_cost, "memory", lambda steps, folder: memory(500, folder))
    command = ["step_cost.py", "--quick", "--json", "--rows", "16", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    step_cost.main()
    *_, last = capsys.readouterr().out.splitlines()
    targets = json.loads(last)["targets"]
    assert set(targets) == {"whole step at 16 rows, µs", "full garbage collections in 1,000 steps"}
    assert targets["full garbage collections in 1,000 steps"] == {"measured": 0, "bar": 0, "met": True}
    cases = [line.split(" | ")[0] for line in out.read_text().splitlines() if line.startswith("| ")]
    assert {
        "| decode",
        "| decode, two in flight",
        "| decode, state slots",
        "| all rows need a block",
        "| preemption storm, swap",
    } <= set(cases)
