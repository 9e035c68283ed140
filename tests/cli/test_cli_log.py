"""`mmengine log` on logs that an engine without a model wrote."""

import json
import shutil

import pytest
from msgspec.structs import replace

from mmengine.cli import main as cli
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.vocabulary import Finished, Started
from mmengine.serve.engine import Engine
from tests.cli.cli_process import loaded, run_cli
from tests.serve.serve_fakes import builder


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    with Engine(builder=builder(), log=folder) as engine:
        engine.generate([f"prompt {k}" for k in range(7)], max_tokens=9)
    return folder


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["mmengine", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, capsys.readouterr()


def test_verify_needs_no_torch(log):
    result = run_cli("log", "verify", str(log), blocked=("torch", "transformers", "llguidance"))
    assert result.returncode == 0 and "verified: no divergence" in result.stdout
    assert "7 requests" in result.stdout and "torch" not in loaded(result)


def forge(log, folder, change):
    """The log, well written, with other events where `change` gives any."""
    writer = LogWriter(folder)
    for record in LogReader(log):
        writer.append(change(record.event) or record.event, record.step, record.mono_ns)
    writer.close()
    return folder


def other_end(event):
    """Another end for one request."""
    if isinstance(event, Finished) and event.request_id.endswith("-3"):
        return Finished(event.request_id, "length")
    return None


def other_rules(event):
    if isinstance(event, Started):
        return replace(event, decision_version=3, engine_version="0.0.9")
    return None


def test_a_forged_decision_is_found_and_named(log, tmp_path, monkeypatch, capsys):
    forged = forge(log, tmp_path / "forged", other_end)
    code, printed = call(monkeypatch, capsys, "log", "verify", forged)
    shown = [line.split("│")[1:3] for line in printed.out.splitlines() if line.startswith("│")]
    cells = {name.strip(): value.strip() for name, value in shown}
    assert code == 3 and "DIVERGED" in printed.out and "the last inputs before it" in printed.out
    assert (cells["field"], cells["logged"], cells["derived"]) == ("reason", "'length'", "'stop'")
    assert cells["written by"].startswith("mmengine ") and "decision rules" in cells["derived by"]
    code, printed = call(monkeypatch, capsys, "log", "verify", forged, "--json")
    found = json.loads(printed.out)
    assert code == found["exit_code"] == 3 and found["divergence"]["field"] == "reason"
    assert found["divergence"]["inputs"][-1]["event"] == "Executed"


def test_a_torn_tail_is_told_and_damage_is_refused(log, monkeypatch, capsys):
    path = next(log.glob("*.mmlog"))
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 0 and "torn tail" in printed.out
    path.write_bytes(data[:200] + b"\0\0\0\0" + data[204:])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 4 and printed.err.startswith("mmengine: ") and len(printed.err.splitlines()) == 1


def test_many_logs_are_verified_at_once(log, tmp_path, monkeypatch, capsys):
    night = tmp_path / "night"
    shutil.copytree(log, night / "a")
    forge(log, night / "b", other_rules)
    code, printed = call(monkeypatch, capsys, "log", "verify", night)
    assert code == 5 and "folded; written under rules 3, this build" in printed.out
    assert "1 of 2 logs verified" in printed.out
    forge(log, night / "c", other_end)
    (tmp_path / "empty").mkdir()
    code, printed = call(monkeypatch, capsys, "log", "verify", night, tmp_path / "empty", "--json")
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert code == 3 and [line["exit_code"] for line in lines] == [0, 5, 3, 1]
    next((night / "a").glob("*.mmlog")).write_bytes(b"no log")
    code, printed = call(monkeypatch, capsys, "log", "verify", night)
    assert code == 4 and "corrupt: " in printed.out and "DIVERGED at step" in printed.out


def test_show_lists_requests_and_steps(log, monkeypatch, capsys):
    code, printed = call(monkeypatch, capsys, "log", "show", log)
    assert code == 0 and printed.out.count("stop: eos") == 7
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--steps", "--json", "--limit", "3")
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert len(lines) == 3 and lines[0]["step"] < lines[2]["step"]


def test_text_of_a_log_cannot_steer_the_terminal(tmp_path, monkeypatch, capsys):
    with Engine(builder=builder(), log=tmp_path / "log") as engine:
        engine.submit("x", request_id="[red]name[/red]", max_tokens=3)
        while engine.has_work:
            engine.step()
    code, printed = call(monkeypatch, capsys, "log", "show", tmp_path / "log")
    assert code == 0 and "[red]name[/red]" in printed.out
