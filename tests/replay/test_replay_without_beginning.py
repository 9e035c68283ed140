"""Tests the log tools on a log whose first segments were deleted. The tools show the remaining records, and
report missing data.
"""

import json
import shutil

import pytest

from mmengine.errors import LogError
from mmengine.events.log import LogReader
from mmengine.replay import request_lines
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.convert.export import csv_lines, mooncake_lines
from mmengine.replay.convert.perfetto import perfetto_lines
from mmengine.replay.convert.redact import redact
from mmengine.replay.diff import diff
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.state_report import state_report
from mmengine.replay.queries.step_report import step_report
from mmengine.replay.queries.why import why
from tests.events.logs import drop_first
from tests.replay.test_replay_from_snapshot import write_run


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    whole = tmp_path_factory.mktemp("run") / "whole"
    write_run(whole)
    rest = whole.with_name("rest")
    shutil.copytree(whole, rest)
    drop_first(rest, 3)
    return whole, rest


def test_remaining_records_read_as_in_the_whole_log(logs):
    whole, rest = logs
    log = CheckedLog(rest)
    left = {line.request_id for line in request_lines(rest)}
    old = set(log.first_state().requests)
    assert old and old < left
    for name in sorted(left):
        all_lines = list(request_events(CheckedLog(whole), name))
        lines = list(request_events(CheckedLog(rest), name))
        behind = [line for line in all_lines if line.sequence > log.begins_after]
        assert [(line.sequence, line.text) for line in lines] == [
            (line.sequence, line.text) for line in behind
        ]
    number = log.first.step + 5
    assert state_report(rest, number) == state_report(whole, number)
    assert step_report(rest, number).waits == step_report(whole, number).waits
    rows, all_rows = (list(csv_lines(folder, steps=True))[1:] for folder in (rest, whole))
    assert rows and rows == all_rows[-len(rows) :]


def test_exports_of_the_remaining_records(logs):
    _, rest = logs
    events = json.loads("\n".join(perfetto_lines(rest)))["traceEvents"]
    begun, ended = ([e["id"] for e in events if e["ph"] == phase] for phase in "be")
    assert sorted(begun) == sorted(ended) and all(e.get("ts", 0) >= 0 for e in events)
    queued = [r for r in LogReader(rest) if type(r.event).__name__ == "Queued"]
    queued = [r for r in queued if r.sequence > CheckedLog(rest).begins_after]
    assert len(list(mooncake_lines(rest))) == len(queued)


def test_unknown_records_are_reported(logs, tmp_path):
    whole, rest = logs
    name = next(iter(CheckedLog(rest).first_state().requests))
    for look, said in (
        (lambda: why(rest, name), "the beginning of the log in .* was deleted"),
        (lambda: redact(rest, tmp_path / "public", bytes(16)), "the beginning of the log in .* was deleted"),
        (lambda: diff(whole, rest), "begin at different records"),
    ):
        with pytest.raises(LogError, match=said):
            look()
    assert not (tmp_path / "public").exists()
    assert diff(rest, rest).kind == ""
