"""Tests the debugger on two logs: stopping at the first difference, and aligning both logs."""

from pathlib import Path

import msgspec
import pytest

from mmengine.errors import InvalidRequest
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.registry import GROUPS
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.debug.state_diff import values_of
from mmengine.replay.diff import diff
from mmengine.replay.findings import Findings
from tests.cli.cli_process import call_cli
from tests.events.logs import rewrite
from tests.replay.runs import busy_run


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the logs of two replicas with the same arrivals under different ids. The second replica has an
    additional block.
    """
    folder = tmp_path_factory.mktemp("pair")
    busy_run(folder / "a", num_requests=16)
    busy_run(folder / "more", num_requests=16, num_blocks=20)
    renamed = (
        msgspec.structs.replace(each, event=_renamed(each.event)) for each in LogReader(folder / "more")
    )
    rewrite(renamed, folder / "b")
    return folder / "a", folder / "b"


def _renamed(event):
    changes = {}
    for name in ("request_id", "group"):
        if getattr(event, name, ""):
            changes[name] = f"x-{getattr(event, name)}"
    return msgspec.structs.replace(event, **changes)


def pair_of(first, second):
    session = Session(open_debugger(first, Findings()), open_debugger(second, Findings()))
    return session, session.pair.other.navigator


def test_it_stops_at_the_first_difference(logs):
    expected = diff(*logs, "arrival")
    session, other = pair_of(*logs)
    blocks = session.run("continue")
    places = session.debugger.navigator.position, other.position
    assert places == tuple(side.sequence for side in expected.sides) and expected.events > 20
    assert blocks[0].title == "first difference" and str(expected.field) in str(blocks[0].rows)
    assert "first difference: " in blocks[1].lines[0]
    assert session.run("continue")[-1].lines[-1].endswith("the end of the log"), "it stops there only once"
    session.run("difference")
    assert (session.debugger.navigator.position, other.position) == places


def test_a_breakpoint_before_the_difference_stops_first(logs):
    session, _ = pair_of(*logs)
    session.run("break step = 3")
    session.run("continue")
    assert session.debugger.navigator.state.step == 3
    assert session.debugger.navigator.position < session.pair.places()[0]


def test_the_other_log_is_aligned(logs):
    # `align` moves the other log to the record that corresponds to this log's position.
    session, other = pair_of(*logs)
    session.run("goto 4")
    session.run("align")
    names = values_of(session.debugger.navigator.state).keys()
    values = values_of(other.state)
    assert {name.replace("request r", "request x-r") for name in names} == values.keys()
    session.run("difference")
    session.run("goto end")
    session.run("align")
    assert other.state.num_arrived == session.debugger.navigator.state.num_arrived
    session.run("difference")
    here = other.position
    session.run("align")
    assert other.position == here


def test_commands_run_on_the_other_log(logs):
    session, other = pair_of(*logs)
    session.run("difference")
    before = session.debugger.navigator.position
    session.run("other goto start")
    assert other.position == 0 and session.debugger.navigator.position == before
    first, ours, second, theirs = session.run("both print free_blocks")
    assert (first.lines, second.lines) == (["a:"], ["b:"])
    assert (ours.lines, theirs.lines) != ([], []) and theirs.lines == ["19"]
    for line in ("both difference", "other other step", "both", "other", "other zzz"):
        with pytest.raises(InvalidRequest):
            session.run(line)
    assert session.debugger.navigator.position == before
    (table,) = session.run("compare")
    assert table.rows and table.header == ("", "a", "b")
    alone = Session(open_debugger(logs[0], Findings()))
    with pytest.raises(InvalidRequest, match="only one log is open"):
        alone.run("difference")


def test_a_log_in_the_current_folder_has_a_name(logs, monkeypatch):
    monkeypatch.chdir(logs[0])
    session, _ = pair_of(Path(), logs[1])
    assert session.pair.names == ("a", "b")


def test_equal_logs_and_logs_that_end_early(logs, tmp_path):
    session, _ = pair_of(logs[0], logs[0])
    assert session.run("compare")[0].lines == ["the states are equal"]
    assert [each.title for each in session.run("help")[:-1]] == list(GROUPS)
    assert session.run("difference")[0].title == "no difference"
    assert session.run("continue")[-1].lines[-1].endswith("the end of the log")
    records = list(LogReader(logs[0]))
    place = next(n for n, each in enumerate(records) if n > 40 and isinstance(each.event, ev.Executed))
    short = rewrite(records[:place], tmp_path / "short")
    session, other = pair_of(logs[0], short)
    (table, *_) = session.run("continue")
    assert table.rows[2] == ("event", "Executed", "the log ends") and other.record is None
    session, other = pair_of(short, logs[0])
    session.run("continue")
    assert session.debugger.navigator.record is None and other.position == place
    assert session.pair.is_at_difference


def test_the_command_opens_two_logs(logs):
    done = call_cli("log", "debug", *logs, "--ex", "continue", "--ex", "both where")
    assert done.returncode == 0 and "first difference" in done.stdout and "\nb:\n" in done.stdout
    done = call_cli("log", "debug", logs[0], logs[0].parent / "none", "--ex", "where")
    assert done.returncode == 1 and "there is no folder" in done.stderr
