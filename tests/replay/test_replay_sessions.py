"""Tests the log tools on logs with sessions: verify, why, redact, playback and minimize. A session holds its
blocks between requests by a lease. The session loses blocks if another request needs them, or above the limit
for all leases.
"""

import sys

import pytest

from mmengine.core.fold.evolve import evolve
from mmengine.core.state.digest import state_digest
from mmengine.core.state.state import State
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import request_lines, verify
from mmengine.replay.checked_log import CheckedLog
from mmengine.replay.convert.redact import redact
from mmengine.replay.queries.request_events import request_events
from mmengine.replay.queries.state_report import state_report
from mmengine.replay.queries.step_report import step_report
from mmengine.replay.queries.why import why
from mmengine.replay.report.collect import collect
from mmengine.replay.rerun.script import read_script
from mmengine.replay.timeline import open_log
from tests.cli.cli_process import call_cli
from tests.replay.runs import session_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions") / "log"
    session_run(folder)
    return folder


def of_kind(folder, kind):
    return [record.event for record in LogReader(folder) if isinstance(record.event, kind)]


def test_the_run_has_all_session_events_and_verifies(folder):
    for kind in (ev.SessionOpened, ev.Appended, ev.Leased, ev.LeaseTaken, ev.SessionClosed):
        assert of_kind(folder, kind), kind
    assert {event.reason for event in of_kind(folder, ev.LeaseTaken)} == {"no free blocks", "session_blocks"}
    report = verify(folder, invariants=True)
    assert report.ok and report.rederived and not report.unfinished, report.divergence


def test_request_lines_count_the_whole_prompt(folder):
    lines = {line.request_id: line for line in request_lines(folder)}
    assert lines["one.0"].num_output_tokens == 0 and lines["one.0"].num_prompt_tokens == 14
    assert lines["one.1"].num_prompt_tokens == 22 and lines["one.1"].num_cached_tokens == 12


def test_a_life_and_its_reasons(folder):
    life = [line.text for line in request_events(CheckedLog(folder), "one.1")]
    assert life[0] == "continues the first 14 tokens of session one"
    assert any("session one leases" in line for line in life)
    claims = {claim.kind: claim.text for claim in why(folder, "one.2")}
    assert "Continues 27 tokens of session one" in claims["session"]
    claims = {claim.kind: claim.text for claim in why(folder, "two.1")}
    assert claims["lease taken"] == ("Step 14 took all but 3 of the session's blocks (no free blocks).")
    claims = {claim.kind: claim for claim in why(folder, "one.3")}
    assert claims["session"].facts["dropped"] > 0 and "were dropped" in claims["session"].text
    assert "max_tokens is 0" in claims["end"].text


def test_the_state_shows_sessions(folder):
    report = state_report(folder, -1)
    (session,) = report.sessions
    assert session.session_id == "one" and session.num_requests == 4
    assert report.leases == {"total": 12, "held": session.leased_blocks}


def test_each_step_is_decided_again(folder):
    number = 0
    for step in open_log(folder).steps():
        assert step.decide() == step.logged, step.number
        number = step.number
    assert step_report(folder, number).is_whole
    assert collect(folder).lanes


def test_a_redacted_log_folds_to_the_same_decisions(folder, tmp_path):
    redact(folder, tmp_path / "redacted", b"sixteen bytes or more")
    assert verify(tmp_path / "redacted").ok
    text = b"".join(path.read_bytes() for path in sorted((tmp_path / "redacted").glob("*.mmlog")))
    for name in (b"one.0", b"tenant", b"kept"):
        assert name not in text
    assert [type(r.event) for r in LogReader(folder)] == [
        type(r.event) for r in LogReader(tmp_path / "redacted")
    ]


def test_playback_repeats_sessions(folder):
    script = read_script(folder)
    kinds = [type(each.event).__name__ for each in script.observations]
    assert kinds.count("Appended") == len(of_kind(folder, ev.Appended)) and "SessionClosed" in kinds


def test_the_log_folds_to_the_same_state_from_any_snapshot(folder):
    records = list(LogReader(folder))
    state = State(CheckedLog(folder).config)
    for record in records:
        evolve(state, record.event)
    assert state_digest(state) == records[-1].event.digest


@pytest.mark.soak
def test_a_log_with_leases_is_minimized(folder, tmp_path):
    """Minimize keeps fewer than four of the eight requests, and blocks are still taken from a session."""
    check = tmp_path / "check.py"
    check.write_text(
        "import sys; from pathlib import Path; from mmengine.events.log import LogReader\n"
        "sys.exit(any(type(r.event).__name__ == 'LeaseTaken' for r in LogReader(Path(sys.argv[1]))))\n"
    )
    done = call_cli(
        *("log", "minimize", str(folder), "--failing", f"{sys.executable} {check} {{}}"),
        *("-o", str(tmp_path / "small")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    small = tmp_path / "small" / "log"
    assert of_kind(small, ev.LeaseTaken) and len(of_kind(small, ev.Queued)) < 4 and verify(small).ok
