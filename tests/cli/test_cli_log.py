"""Tests `mmengine log` with logs from an engine without a model."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from mmengine.cli import main as cli
from mmengine.events.lock import lock
from mmengine.events.log import LogReader, LogWriter
from mmengine.events.segment import FOOTER_SIZE, Scan
from mmengine.events.vocabulary import Finished, Started
from mmengine.serve.engine.engine import Engine
from tests.cli.cli_process import loaded, run_cli
from tests.core.small_engine import Bench, request
from tests.replay.runs import busy_run
from tests.serve.serve_fakes import builder


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    with Engine(builder=builder(), log=folder) as engine:
        engine.generate([f"prompt {k}" for k in range(7)], max_tokens=9)
    return folder


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["mmengine", *map(str, arguments)])
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, capsys.readouterr()


def test_verify_needs_no_torch(log):
    result = run_cli("log", "verify", str(log), blocked=("torch", "transformers", "llguidance"))
    assert result.returncode == 0 and "verified: no divergence" in result.stdout
    assert "7 requests" in result.stdout and "torch" not in loaded(result)


def test_pending_lists_the_requests_that_a_kill_cut_short(log, tmp_path, monkeypatch, capsys):
    code, printed = call(monkeypatch, capsys, "log", "pending", log)
    assert code == 0 and printed.out == "all requests have ended\n"
    records = list(LogReader(log))
    first = next(place for place, record in enumerate(records) if isinstance(record.event, Finished))
    writer = LogWriter(tmp_path / "cut")
    for record in records[:first]:
        writer.append(record.event, record.step, record.mono_ns)
    writer.close()
    code, printed = call(monkeypatch, capsys, "log", "pending", tmp_path / "cut", "--json")
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert code == 0 and len(found) == 7 and any(each["output_tokens"] for each in found)
    code, printed = call(monkeypatch, capsys, "log", "pending", tmp_path / "cut")
    assert "running" in printed.out and "7 requests have not ended" in printed.out


def forge(log, folder, change):
    """Copy a log, and replace each event for which `change` returns a new event."""
    writer = LogWriter(folder)
    for record in LogReader(log):
        writer.append(change(record.event) or record.event, record.step, record.mono_ns)
    writer.close()
    return folder


def other_end(event):
    """Change the finish reason for one request."""
    if isinstance(event, Finished) and event.request_id.endswith("-3"):
        return Finished(event.request_id, "length")
    return None


def other_rules(event):
    if isinstance(event, Started):
        return replace(event, decision_version=5, engine_version="0.0.9")
    return None


def test_a_forged_decision_is_found_and_named(log, tmp_path, monkeypatch, capsys):
    forged = forge(log, tmp_path / "forged", other_end)
    code, printed = call(monkeypatch, capsys, "log", "verify", forged)
    shown = [line.split("│")[1:3] for line in printed.out.splitlines() if line.startswith("│")]
    cells = {name.strip(): value.strip() for name, value in shown}
    assert code == 3 and "DIVERGED" in printed.out and "the last inputs before it" in printed.out
    assert (cells["field"], cells["logged"], cells["derived"]) == ("reason", "length", "stop")
    assert cells["written by"].startswith("mmengine ") and "decision rules" in cells["derived by"]
    code, printed = call(monkeypatch, capsys, "log", "verify", forged, "--json")
    found = json.loads(printed.out)
    assert code == found["exit_code"] == 3 and found["divergence"]["field"] == "reason"
    assert found["divergence"]["inputs"][-1]["event"] == "Executed"


def test_a_torn_tail_is_reported_and_damage_is_refused(log, monkeypatch, capsys):
    path = next(log.glob("*.mmlog"))
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 6 and "torn tail" in printed.out and "the log has no end" in printed.out
    path.write_bytes(data[:200] + b"\0\0\0\0" + data[204:])
    code, printed = call(monkeypatch, capsys, "log", "verify", log)
    assert code == 4 and printed.err.startswith("mmengine: ") and len(printed.err.splitlines()) == 1


def gone_segment(paths):
    paths[-1].unlink()


def emptied_segment(paths):
    paths[-1].write_bytes(b"")


def only_an_empty_one(paths):
    for path in paths[1:]:
        path.unlink()
    paths[0].write_bytes(b"")


def no_footer(paths):
    paths[-1].write_bytes(paths[-1].read_bytes()[:-FOOTER_SIZE])


def no_last_frame(paths):
    frames = [frame.offset for frame in Scan(paths[-1].read_bytes()).frames()]
    paths[-1].write_bytes(paths[-1].read_bytes()[: frames[-1]])


def half_a_frame(paths):
    paths[-1].write_bytes(paths[-1].read_bytes()[: -FOOTER_SIZE - 3])


@pytest.mark.parametrize(
    "cut, expected, said",
    [
        (gone_segment, 13, "says that another segment follows record"),
        (emptied_segment, 13, "the end is missing"),
        (only_an_empty_one, 13, "all segments are empty"),
        (no_footer, 14, "or the file was cut there, between two frames"),
        (no_last_frame, 14, "or the file was cut there, between two frames"),
        (half_a_frame, 6, "cut short"),
    ],
)
def test_three_commands_agree_on_a_missing_end(log, tmp_path, monkeypatch, capsys, cut, expected, said):
    writer = LogWriter(tmp_path / "cut", segment_bytes=4000, pack_full=False)
    for record in LogReader(log):
        writer.append(record.event, record.step, record.mono_ns)
        assert writer.commit()
    writer.close()
    for verb in ("verify", "show", "fsck"):
        assert call(monkeypatch, capsys, "log", verb, tmp_path / "cut")[0] == 0
    cut(sorted((tmp_path / "cut").glob("*.mmlog")))
    for verb in ("verify", "show", "fsck"):
        code, printed = call(monkeypatch, capsys, "log", verb, tmp_path / "cut")
        text = printed.out + printed.err
        assert code == expected and (said in text or verb == "verify" and "torn tail" in text), (verb, text)
    holder = lock(tmp_path / "cut")
    try:  # While a writer holds the lock, the missing bytes may still be written.
        for verb in ("verify", "show", "fsck") if cut is not only_an_empty_one else ("fsck",):
            code, printed = call(monkeypatch, capsys, "log", verb, tmp_path / "cut")
            assert code == 0 and ("missing" not in printed.out or verb == "show")
    finally:
        os.close(holder)


def test_many_logs_are_verified_at_once(log, tmp_path, monkeypatch, capsys):
    night = tmp_path / "night"
    shutil.copytree(log, night / "a")
    forge(log, night / "b", other_rules)
    code, printed = call(monkeypatch, capsys, "log", "verify", night)
    assert code == 5 and "folded; written under rules 5, this build" in printed.out
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


def test_show_one_request_one_step_and_the_state(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    live = busy_run(log, 1)
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--request", live.queued[0])
    assert code == 0 and "arrived: " in printed.out and "ended: " in printed.out
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--step", "20")
    assert code == 0 and "KV blocks" in printed.out and "not scheduled" in printed.out
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--step", "20", "--json")
    step = json.loads(printed.out)
    assert len(step["batch"]) == live.steps[20][0] and step["waits"][0]["kind"]
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--at", "20")
    assert code == 0 and "before step 20: " in printed.out and "waiting, in queue order" in printed.out
    code, printed = call(monkeypatch, capsys, "log", "show", log, "--at", "-1", "--json")
    assert json.loads(printed.out)["running"] == []
    code, printed = call(monkeypatch, capsys, "log", "why", log, live.queued[0])
    assert code == 0 and "Arrived with" in printed.out and "Finished after" in printed.out
    code, printed = call(monkeypatch, capsys, "log", "why", log, live.queued[0], "--json")
    assert json.loads(printed.out.splitlines()[0])["kind"] == "arrival"


def test_show_reports_missing_requests_and_steps(log, monkeypatch, capsys):
    for arguments, said, expected in (
        (["--step", "9999"], "step 9999 has no decisions", 1),
        (["--request", "nobody"], "has this id", 1),
        (["--step", "1", "--steps"], "choose one of", 2),
        (["--at", "1", "--follow"], "choose one of", 2),
    ):
        code, printed = call(monkeypatch, capsys, "log", "show", log, *arguments)
        assert code == expected and said in printed.err and len(printed.err.splitlines()) == 1


def test_follow_continues_until_interrupted(tmp_path):
    """One process follows the log while another process writes records."""
    folder = tmp_path / "log"
    folder.mkdir()
    program = "from mmengine.cli.main import main; main()"
    reader = subprocess.Popen(
        [sys.executable, "-c", program, "log", "show", str(folder), "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Engine(builder=builder(), log=folder) as engine:
        engine.generate(["one", "two"], max_tokens=9)
    ended = {json.loads(reader.stdout.readline())["finish_reason"] for _ in range(2)}
    reader.send_signal(signal.SIGINT)
    out, err = reader.communicate(timeout=60)
    assert ended == {"stop"} and (reader.returncode, out, err) == (0, "", "")


def test_log_text_cannot_control_the_terminal(tmp_path, monkeypatch, capsys):
    name = "[red]name[/red]\x1b[31m"
    bench = Bench(sink=LogWriter(tmp_path / "log"))
    bench.submit(request(name, 5))
    while bench.core.has_work:
        bench.core.step()
    bench.core.close()
    verbs = (
        ["show"],
        ["show", "--step", "0"],
        ["show", "--at", "1"],
        ["show", "--request", name],
        ["why", name],
    )
    for verb, *arguments in verbs:
        code, printed = call(monkeypatch, capsys, "log", verb, tmp_path / "log", *arguments)
        assert code == 0 and "\x1b" not in printed.out
        assert "[red]name[/red]\ufffd" in printed.out or name in arguments


def test_diff_and_redact(tmp_path, monkeypatch, capsys):
    busy_run(tmp_path / "a", 1)
    busy_run(tmp_path / "b", 1, token_budget=23)
    code, printed = call(monkeypatch, capsys, "log", "diff", tmp_path / "a", tmp_path / "a")
    assert code == 0 and printed.out.startswith("equal: ")
    code, printed = call(monkeypatch, capsys, "log", "diff", tmp_path / "a", tmp_path / "b")
    assert (
        code == 3 and "token_budget" in printed.out and "then different decisions: tokens of" in printed.out
    )
    code, printed = call(monkeypatch, capsys, "log", "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(printed.out)
    assert code == 3 and not found["same"] and found["settings"]["token_budget"] == [24, 23]
    code, printed = call(monkeypatch, capsys, "log", "redact", tmp_path / "a", tmp_path / "public")
    assert code == 0 and "verified: the redacted log has the same decisions" in printed.out
    code, printed = call(monkeypatch, capsys, "log", "redact", tmp_path / "a", tmp_path / "public")
    assert code == 2 and "already exists" in printed.err
    (tmp_path / "key").write_bytes(b"short")
    arguments = tmp_path / "a", tmp_path / "other", "--key", tmp_path / "key"
    code, printed = call(monkeypatch, capsys, "log", "redact", *arguments)
    assert code == 2 and "at least 16" in printed.err and not (tmp_path / "other").exists()
    (tmp_path / "key").write_bytes(bytes(32))
    code, printed = call(monkeypatch, capsys, "log", "redact", *arguments, "--json")
    assert code == 0 and json.loads(printed.out)["verified"] is True


def test_export(tmp_path, monkeypatch, capsys):
    live = busy_run(tmp_path / "log", 1)
    code, printed = call(monkeypatch, capsys, "log", "export", tmp_path / "log", "--csv")
    assert code == 0 and len(printed.out.splitlines()) == 1 + len(live.queued)
    out = tmp_path / "trace.json"
    code, printed = call(monkeypatch, capsys, "log", "export", tmp_path / "log", "--perfetto", "-o", out)
    assert code == 0 and not printed.out and json.loads(out.read_text())["traceEvents"]
    code, printed = call(monkeypatch, capsys, "log", "export", tmp_path / "log", "--mooncake")
    assert [json.loads(line)["input_length"] for line in printed.out.splitlines()] == [
        live.prompts[name][0] for name in live.queued
    ]
    for arguments in ([], ["--csv", "--mooncake"], ["--mooncake", "--steps"]):
        code, printed = call(monkeypatch, capsys, "log", "export", tmp_path / "log", *arguments)
        assert code == 2 and "choose one of" in printed.err
