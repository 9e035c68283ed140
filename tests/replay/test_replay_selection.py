"""Tests how `log show` selects and sorts requests, shows wall-clock times, and finds requests by the client's
id.
"""

import json
from dataclasses import replace
from datetime import datetime

import msgspec
import pytest

from mmengine.cli import main as cli
from mmengine.core.engine import EngineCore
from mmengine.errors import InvalidRequest
from mmengine.events.log import LogReader, LogWriter
from mmengine.replay import request_lines
from mmengine.replay.queries.envelopes import client_ids
from mmengine.replay.queries.request_names import find_requests
from mmengine.replay.queries.selection import Selection, duration_ns
from mmengine.replay.queries.wall_clock import UNKNOWN, WallClock
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.core.small_engine import request, settings_of
from tests.replay.planted.nights import Night

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
WALL_NS = 1_790_000_000 * 10**9


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    folder = tmp_path_factory.mktemp("night") / "log"
    Night(num_requests=40).run(folder)
    return folder


def show(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["mmengine", "log", "show", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, capsys.readouterr()


def listed(monkeypatch, capsys, *arguments):
    code, said = show(monkeypatch, capsys, *arguments, "--json")
    assert not code, said.err
    return [json.loads(line) for line in said.out.splitlines()]


@pytest.mark.parametrize(
    ("sort", "field"), [("total", "end_ns"), ("queued", "admitted_ns"), ("preempted", "num_preemptions")]
)
def test_requests_are_sorted(night, monkeypatch, capsys, sort, field):
    lines = listed(monkeypatch, capsys, night, "--sort", sort, "--limit", 7)
    values = [line[field] for line in lines if line[field] >= 0]
    every = sorted((getattr(line, field) for line in request_lines(night)), reverse=True)
    open_ones = sum(value < 0 for value in every)
    assert len(lines) == 7 and values == every[: 7 - min(7, open_ones)]


def test_requests_are_selected(night, monkeypatch, capsys):
    every = request_lines(night)
    middle = f"{sorted(line.end_ns for line in every)[len(every) // 2] / 1e6:.3f}ms"
    for arguments, selected in (
        (["--preempted"], lambda line: line.num_preemptions > 0),
        (["--finish", "length"], lambda line: line.finish_reason == "length"),
        (["--finish", "unfinished"], lambda line: not line.finish_reason),
        (["--slower-than", middle], lambda line: line.end_ns < 0 or line.end_ns > duration_ns(middle)),
    ):
        names = [line["request_id"] for line in listed(monkeypatch, capsys, night, *arguments, "--limit", 99)]
        assert names == [line.request_id for line in every if selected(line)]
    assert 0 < len(names) < len(every)
    code, said = show(monkeypatch, capsys, night, "--preempted", "--limit", 1)
    assert not code and "1 of " in said.out and "--limit" in said.out
    code, said = show(monkeypatch, capsys, night, "--sort", "queued")
    assert not code and "queued ms" in said.out


def test_bad_selections_are_refused(night, monkeypatch, capsys):
    code, said = show(monkeypatch, capsys, night, "--slower-than", "soon")
    assert code == 2 and "'soon' is not a duration; write 500ms, 2s or 1.5m" in said.err
    code, said = show(monkeypatch, capsys, night, "--steps", "--preempted")
    assert code == 2 and "select from the list" in said.err
    code, said = show(monkeypatch, capsys, night, "--sort", "total", "--follow")
    assert code == 2 and "--sort does not go with --follow" in said.err


def test_durations():
    assert [duration_ns(text) for text in ("2", "500ms", "1.5m", "1h")] == [
        *(2 * 10**9, 500 * 10**6, 90 * 10**9, 3600 * 10**9)
    ]
    for text in ("", "-1s", "1e9s", "1" * 40, "2 s"):
        with pytest.raises(InvalidRequest):
            duration_ns(text)
    assert not Selection().selects and Selection(preempted=True).selects


def test_wall_clock_times(tmp_path, monkeypatch, capsys):
    config, now = settings_of(), iter(range(10**15, 10**18, 10**6))
    sink = LogWriter(tmp_path / "log", wall_ns=lambda: WALL_NS)
    core = EngineCore(config, SimulatedExecutor(config), sink=sink, clock=lambda: next(now))
    core.submit(request("a", 9))
    while core.has_work:
        core.step()
    core.close()
    clock, records = WallClock(tmp_path / "log"), list(LogReader(tmp_path / "log"))
    assert clock.at(records[0]) == WALL_NS
    assert clock.at(records[3]) - WALL_NS == records[3].mono_ns - records[0].mono_ns
    (line,) = request_lines(tmp_path / "log")
    assert 0 <= line.wall_ns - WALL_NS < 10**9
    day = f"{datetime.fromtimestamp(WALL_NS // 10**9):%Y-%m-%d %H:%M:}"
    for arguments in ((), ("--request", "a"), ("--step", 1)):
        code, said = show(monkeypatch, capsys, tmp_path / "log", "--wall", *arguments)
        assert not code and day in said.out
        code, said = show(monkeypatch, capsys, tmp_path / "log", *arguments)
        assert not code and day not in said.out


def test_a_log_without_wall_clock_times(tmp_path):
    config = settings_of()
    sink = LogWriter(tmp_path / "log", wall_ns=lambda: 0)
    EngineCore(config, SimulatedExecutor(config), sink=sink).close()
    assert WallClock(tmp_path / "log").at(next(iter(LogReader(tmp_path / "log")))) == UNKNOWN


def test_a_client_finds_its_request_by_every_id(tmp_path, monkeypatch, capsys):
    owner = "0123456789abcdef"
    envelopes = {
        f"{owner}:one": {"api": "chat", "key": "retry 7", "traceparent": TRACE},
        "two": {"api": "responses"},
        "three": {"api": "messages"},
        "batch_9-4": {"api": "chat", "custom_id": "row 4"},
        "mine": {"api": "completion"},
        "none": {},
    }
    config = settings_of()
    core = EngineCore(config, SimulatedExecutor(config), sink=LogWriter(tmp_path / "log"))
    for name, envelope in envelopes.items():
        asked = request(name, [1, 2, 3])
        core.submit(replace(asked, envelope=msgspec.json.encode(envelope) if envelope else b""))
    while core.has_work:
        core.step()
    core.close()
    for given, name in {
        "chatcmpl-one": f"{owner}:one",
        "one": f"{owner}:one",
        "retry 7": f"{owner}:one",
        TRACE.split("-")[1]: f"{owner}:one",
        "resp_two": "two",
        "msg_three": "three",
        "row 4": "batch_9-4",
        "cmpl-mine": "mine",
        "mine": "mine",
    }.items():
        assert find_requests(tmp_path / "log", given) == [name]
    lines = {line.request_id: line.client_ids for line in request_lines(tmp_path / "log")}
    assert lines[f"{owner}:one"] == ("chatcmpl-one", "retry 7", TRACE.split("-")[1])
    assert lines["none"] == () and client_ids("x", b"{]") == () and client_ids("x", b'{"api":3}') == ()
    code, said = show(monkeypatch, capsys, tmp_path / "log")
    assert not code and "client's id" in said.out and "resp_two" in said.out
