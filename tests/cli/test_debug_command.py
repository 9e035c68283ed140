"""Tests `mmengine log debug` as a command: scripts, exit codes, completion, and a log with hostile texts."""

import gc
import os
import pty
import select
import subprocess
import sys
import time

import msgspec
import pytest

from mmengine.cli.logs.debug_prompt import completions
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.debug import open_debugger
from mmengine.replay.debug.commands.session import Session
from mmengine.replay.timeline import open_log
from mmengine.server.debug.app import DebugApp
from tests.cli.cli_process import call_cli
from tests.events.logs import rewrite
from tests.project.doc_blocks import blocks
from tests.replay.broken_builds import write_broken
from tests.replay.runs import busy_run

EVIL = "\x1b[31mred\x1b[0m\n[bold]<script>alert(1)</script>"


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("busy") / "log"
    busy_run(folder, num_requests=12)
    return folder


def test_a_script_runs_in_order(busy, tmp_path):
    script = tmp_path / "script"
    script.write_text("# a comment\nbreak preempted\n\ncontinue\n")
    done = call_cli("log", "debug", busy, "-x", script, "--ex", "info queue", "--ex", "reverse-continue")
    assert done.returncode == 0, done.stderr
    places = [done.stdout.index(f"(mm) {line}") for line in ("break", "continue", "info queue", "reverse")]
    assert places == sorted(places)
    assert "breakpoint 1, event = Preempted" in done.stdout and "┃ waits for" in done.stdout


def test_a_command_that_fails_ends_the_script(busy):
    done = call_cli("log", "debug", busy, "--ex", "goto 99999", "--ex", "where")
    assert done.returncode == 1 and "step 99999 has no decisions" in done.stderr
    assert "(mm) where" not in done.stdout


@pytest.fixture
def collections():
    """Yield a list with an entry for each garbage collection. The collector runs as often as possible."""
    found, threshold = [], gc.get_threshold()

    def note(phase, info):
        found.append(info)

    gc.callbacks.append(note)
    gc.set_threshold(1)
    yield found
    gc.set_threshold(*threshold)
    gc.callbacks.remove(note)


def test_no_collection_interrupts_a_command(busy, collections, monkeypatch):
    try_run, counts = Session.try_run, []

    def counted(session, line):
        before = len(collections)
        answer = try_run(session, line)
        counts.append(len(collections) - before)
        return answer

    monkeypatch.setattr(Session, "try_run", counted)
    done = call_cli("log", "debug", busy, "--ex", "goto end", "--ex", "goto 5")
    app = DebugApp(Session(open_debugger(busy)), "log", 1)
    assert [each.error for each in app._answers(["goto end", "goto 5"])] == ["", ""]
    assert done.returncode == 0 and counts == [0, 0, 0, 0]
    assert gc.isenabled() and collections


def test_a_terminal_shows_the_prompt_and_nothing_over_it(busy):
    """No progress line appears, because the line would overwrite the user's input."""
    ours, its = pty.openpty()
    code = "import sys; from mmengine.cli.main import main; sys.argv[0] = 'mmengine'; main()"
    command = [sys.executable, "-c", code, "log", "debug", str(busy)]
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its)
    shown = b""
    for line in (b"goto 3\n", b"quit\n"):
        shown += _read_until(ours, b"(mm) ")
        time.sleep(0.5)  # Progress lines would appear ten times per second.
        os.write(ours, line)
    shown += _read_until(ours, b"quit\r\n")
    assert process.wait(60) == 0
    os.close(ours)
    assert b"step 3, record" in shown and b"reading the log" not in shown
    assert shown.count(b"(mm) ") == 2 and b"(mm) goto 3\r\n" in shown


def _read_until(terminal, end):
    shown = b""
    while not shown.endswith(end):
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, shown
        shown += os.read(terminal, 1)
    return shown


def test_findings_are_reported(tmp_path):
    done = call_cli("log", "debug", write_broken(tmp_path / "log", "over_budget"), "--ex", "goto end")
    assert done.returncode == 0 and "breaks the rule budgets" in done.stderr


def test_hostile_texts_are_printed_without_control_characters(busy, tmp_path):
    records = list(LogReader(busy))
    victim = next(each.event.request_id for each in records if isinstance(each.event, ev.Queued))
    folder = rewrite((_renamed(each, victim) for each in records), tmp_path / "log")
    lines = ("goto event 1", "info requests", "list 20", "goto end", "reverse-stepi", "info queue", "break x")
    done = call_cli("log", "debug", folder, *(word for line in lines for word in ("--ex", line)))
    assert "red" in done.stdout and "alert(1)" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr and "[bold]<script>" in done.stdout


def _renamed(record, victim):
    if getattr(record.event, "request_id", None) != victim:
        return record
    return msgspec.structs.replace(record, event=msgspec.structs.replace(record.event, request_id=EVIL))


def test_the_conditions_of_the_reference_are_accepted(busy):
    session = Session(open_debugger(busy))
    conditions, code = blocks("docs/reference/debugger.md", "indented")
    lines = [line.strip().split("   ")[0] for line in conditions.text.splitlines() if line.strip()]
    for line in lines:
        session.run(line)
    assert len(session.debugger.stops) == len(lines) == 6
    step = next(step.number for step in open_log(busy).steps())
    text = code.text.replace("evening.log", str(busy)).replace("at(9)", f"at({step})")
    names = {"breakpoint": lambda: None}
    exec(compile(text, code.name, "exec"), names)
    assert names["step"].decided == names["step"].logged


def test_words_are_completed(busy):
    session = Session(open_debugger(busy))
    moves = ["reverse-step", "reverse-stepi", "reverse-next", "reverse-continue"]
    assert completions(session, "", "rev") == moves
    assert "queue" in completions(session, "info ", "q")
    assert "preempted" in completions(session, "break ", "pre")
    session.run("goto end")
    session.run("reverse-continue")
    session.run("stepi 9")
    names = list(session.debugger.navigator.state.requests)
    assert set(names) <= set(completions(session, "goto ", "r"))
