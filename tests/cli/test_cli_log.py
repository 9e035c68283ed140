"""`mmengine log` on logs that an engine without a model wrote."""

import json

import pytest

from mmengine.cli import main as cli
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.vocabulary import Finished
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


def forge(log, folder):
    """The log with another end for one request, well written."""
    writer = LogWriter(folder)
    for record in LogReader(log):
        event = record.event
        if isinstance(event, Finished) and event.request_id.endswith("-3"):
            event = Finished(event.request_id, "length")
        writer.append(event, record.step, record.mono_ns)
    writer.close()


def test_a_forged_decision_is_found_and_named(log, tmp_path, monkeypatch, capsys):
    forge(log, tmp_path / "forged")
    code, printed = call(monkeypatch, capsys, "log", "verify", tmp_path / "forged")
    assert code == 1 and "DIVERGED" in printed.out and "field reason" in printed.out
    assert "logged   'length'" in printed.out and "derived  'stop'" in printed.out
    code, printed = call(monkeypatch, capsys, "log", "verify", tmp_path / "forged", "--json")
    assert code == 1 and json.loads(printed.out)["divergence"]["field"] == "reason"


def test_a_torn_tail_is_told_and_damage_is_refused(log, monkeypatch, capsys):
    path = next(log.glob("*.mmlog"))
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 0 and "torn tail" in printed.out
    path.write_bytes(data[:200] + b"\0\0\0\0" + data[204:])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 1 and printed.err.startswith("mmengine: ") and len(printed.err.splitlines()) == 1


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
