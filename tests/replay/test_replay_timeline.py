"""Tests `open_log`: walking over events and steps, inspecting the state at a step, and running the real
scheduler on this state.
"""

import random

import pytest

from mmengine.core.decide.scheduler import SCHEDULER
from mmengine.core.state.digest import state_digest
from mmengine.errors import CorruptLog, Diverged, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import open_log
from tests.core.workloads import check_invariants, small_config
from tests.replay.runs import busy_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "log"
    busy_run(folder)
    return folder


def test_every_event_comes_with_the_state_before_it(folder):
    records = list(LogReader(folder))
    seen = []
    for state, record in open_log(folder).events():
        check_invariants(state)
        if isinstance(record.event, ev.Checkpoint):
            assert state_digest(state) == record.event.digest
        seen.append(record)
    assert seen == records


@pytest.mark.parametrize("decide", ["all", "one", "none"])
def test_the_scheduler_decides_each_step_as_logged(folder, decide):
    """The walk continues correctly whether a step was decided fully, partly or not at all."""
    numbers = []
    for step in open_log(folder).steps():
        numbers.append(step.number)
        assert step.state.step == step.number and not step.state.is_open
        if decide == "all":
            assert step.decide() == step.logged and step.next_decision() is None
        elif decide == "one":
            assert step.next_decision() == step.logged[0] == step.decided[0]
    ran = {r.step for r in LogReader(folder) if isinstance(r.event, (ev.Executed, ev.Failed))}
    assert numbers == sorted(ran)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_repeat_their_decisions(tmp_path, seed):
    config = small_config(random.Random(seed))
    names = ("policy", "compat", "num_draft_tokens", "lookahead_tokens", "admission_reserve", "split_media")
    settings = {name: getattr(config, name) for name in names}
    busy_run(tmp_path / "log", seed, num_requests=12, **settings)
    for step in open_log(tmp_path / "log").steps():
        assert step.decide() == step.logged


def test_a_step_stays_valid(folder):
    log = open_log(folder)
    step = log.at(11)
    before = state_digest(step.state)
    for other in log.steps():
        other.decide()
    assert state_digest(step.state) == before
    assert SCHEDULER.schedule(step.view) == step.logged[0], "the view is that of the scheduler"
    with pytest.raises(ValueError, match="read-only"):
        step.view.num_tokens[0] = 3
    assert step.decide() == step.logged


def test_changing_a_state_does_not_change_the_log(folder):
    steps = open_log(folder).steps()
    step = next(step for step in steps if len(step.logged) > 1)
    step.state.tokens_left = 1
    assert step.decide() != step.logged
    with pytest.raises(Diverged, match=f"step {step.number} was decided differently"):
        next(steps)


def test_a_missing_step(folder):
    last = [step.number for step in open_log(folder).steps()][-1]
    for number in (-1, last + 1):
        with pytest.raises(LogError, match=f"it has steps 0 to {last}" if number > 0 else "has no decisions"):
            open_log(folder).at(number)


def test_a_log_cut_within_its_last_step(folder, tmp_path):
    (path,) = folder.glob("*.mmlog")
    records = list(LogReader(folder))
    index = next(n for n, r in enumerate(records) if n > 40 and isinstance(r.event, ev.Admitted))
    (tmp_path / path.name).write_bytes(path.read_bytes()[: records[index].offset])
    for step in open_log(tmp_path).steps():
        decided = step.decide()
        assert decided[: len(step.logged)] == step.logged


def test_a_step_that_never_ends_is_refused(folder, tmp_path):
    """A step's number of decisions is limited, even if each decision could be valid."""
    records = list(LogReader(folder))
    index = next(n for n, r in enumerate(records) if isinstance(r.event, ev.Admitted))
    writer = LogWriter(tmp_path / "log")
    for record in [*records[:index], *[records[index]] * 5000]:
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    with pytest.raises(CorruptLog, match="a step with more than"):
        list(open_log(tmp_path / "log").steps())


def test_steps_under_other_rules_use_this_builds_rules(folder, tmp_path):
    records = list(LogReader(folder))
    writer = LogWriter(tmp_path / "log")
    for record in records:
        event = record.event
        if isinstance(event, ev.Started):
            event = ev.Started(**{**_fields(event), "decision_version": 99})
        writer.append(event, record.step, record.mono_ns)
    writer.close()
    step = open_log(tmp_path / "log").at(5)
    assert step.decide() == step.logged
    assert open_log(tmp_path / "log").started.decision_version == 99


def _fields(event):
    return {name: getattr(event, name) for name in event.__struct_fields__}
