"""Tests that tools read the logs from builds with bugs. Tools report an impossible decision as a finding, and
continue.
"""

import json
from contextlib import nullcontext

import pytest

from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import open_log, replay_failure, request_lines, step_lines, verify
from mmengine.replay.findings import Findings
from mmengine.replay.minimize.failures import find_failure
from mmengine.replay.minimize.shrink import before_recoveries
from mmengine.replay.rerun.script import read_script
from tests.cli.cli_process import call_cli
from tests.replay.broken_builds import planted, write_broken, write_restarted

OVER = "breaks the rule budgets: step 2 schedules 17 tokens of a budget of 16 (token_budget)"
TWICE = "breaks the rule hits: request 'r1' starts with 4 prefix hits, 2 of them counted twice"
VERBS = {
    "show": (),
    "why": ("r2",),
    "report -o page.html": (),
    "export --mooncake": (),
    "redact": ("public",),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    return {name: write_broken(folder / name, name) for name in ("over_budget", "hits_twice", "crashing")}


@pytest.mark.parametrize("name, text", [("over_budget", OVER), ("hits_twice", TWICE)])
def test_the_log_of_a_bug_is_read_to_its_end(logs, name, text):
    findings = Findings()
    lines = request_lines(logs[name], findings)
    assert text in str(findings.listed[0]) and findings.last is None
    assert len(lines) == 24 and all(line.finish_reason == "length" for line in lines)
    assert len(list(step_lines(logs[name]))) == verify_with_bug(logs[name], name).steps


def verify_with_bug(log, name):
    with planted(name):
        report = verify(log)
    assert report.ok
    return report


def test_a_finding_has_its_figures(logs):
    findings = Findings()
    request_lines(logs["over_budget"], findings)
    found = findings.listed[0]
    assert (found.rule, found.step, found.event, found.value, found.limit) == (
        "budgets",
        2,
        "Scheduled",
        17,
        16,
    )
    step = open_log(logs["over_budget"]).at(3)
    assert step.number == 3, "a walk continues after the finding"


def test_two_passes_find_the_same_once(logs):
    # A second pass over the log adds no finding that the first pass found.
    findings = Findings()
    request_lines(logs["hits_twice"], findings)
    count = findings.count
    request_lines(logs["hits_twice"], findings)
    assert findings.count == count == len(findings.listed) > 5


@pytest.mark.parametrize("name", ["over_budget", "hits_twice"])
def test_verify_names_the_rule_that_the_logged_decision_breaks(logs, name):
    """A build with the bug reports a broken invariant. A build without the bug reports a divergence, and
    names the broken rule.
    """
    with planted(name):
        broken = verify(logs[name], invariants=True).divergence
    rule = {"over_budget": "budgets", "hits_twice": "hits"}[name]
    assert broken.field == f"invariant {rule}"
    parted = verify(logs[name]).divergence
    assert parted.sequence == broken.sequence and parted.broken.rule == rule
    assert parted.broken.text in broken.derived or rule == "budgets"


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_says_which_rule_broke(logs, tmp_path, verb):
    words, log = verb.split(), logs["over_budget"]
    done = call_cli("log", words[0], log, *VERBS[verb], *words[1:], cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert OVER in done.stderr
    assert f"mmengine log verify {log} --invariants" in done.stderr and "--failing budgets" in done.stderr


@pytest.mark.parametrize("name, kind", [("over_budget", "budgets"), ("hits_twice", "hits")])
def test_minimize_takes_the_finding_as_the_failure(logs, tmp_path, name, kind):
    """In a build with the bug, minimize schedules the requests again and finds the failure again. In a build
    without the bug, minimize keeps the recorded decisions, and only removes requests. Each minimized log
    fails only with the bug.
    """
    for folder, bug in (("decided", True), ("recorded", False)):
        words = ("log", "minimize", logs[name], "--failing", kind, "-o", tmp_path / folder, "--json")
        with planted(name) if bug else nullcontext():
            done = call_cli(*words)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["failure"], report["recorded"]) == (kind, not bug)
        assert report["requests"] <= 4 and report["requests_before"] == 24
        assert replay_failure(tmp_path / folder / "log", kind) is None
        with planted(name):
            assert replay_failure(tmp_path / folder / "log", kind).kind == kind
        findings = Findings()
        assert len(request_lines(tmp_path / folder / "log", findings)) == report["requests"]
        assert findings.listed[0].rule == kind


def test_minimize_shrinks_a_log_whose_engine_died(logs, tmp_path):
    words = ("log", "minimize", logs["crashing"], "--failing", "crash", "-o", tmp_path / "small", "--json")
    with planted("crashing"):
        done = call_cli(*words)
    report = json.loads(done.stdout)
    assert report["requests"] == 3 and "IndexError" in report["what"]
    with planted("crashing"):
        assert replay_failure(tmp_path / "small" / "log", "crash").what == report["what"]
    done = call_cli(*words[:-2], tmp_path / "other")
    assert done.returncode == 1 and "this build does not have the bug" in done.stderr


def test_minimize_finds_a_crash_that_a_restart_survived(tmp_path):
    log = write_restarted(tmp_path / "log")
    assert verify(log).ok and any(isinstance(record.event, ev.Recovered) for record in LogReader(log))
    crashed = next(record.step for record in LogReader(log) if isinstance(record.event, ev.Recovered))
    (script,) = before_recoveries(read_script(log))
    assert not any(isinstance(each.event, ev.Recovered) for each in script.observations)
    with planted("crashing"):
        failure = find_failure(script, "crash")
        assert (failure.kind, failure.step) == ("crash", crashed)
        done = call_cli("log", "minimize", log, "--failing", "crash", "-o", tmp_path / "small", "--json")
    assert "IndexError" in json.loads(done.stdout)["what"], done.stderr


def test_verify_tells_that_this_build_crashes_where_the_log_ends(logs):
    with planted("crashing"):
        found = verify(logs["crashing"]).divergence
    assert (found.field, found.sequence) == (
        "crash",
        14,
    ) and "IndexError in broken_builds.py" in found.derived
    report = verify(logs["crashing"])
    assert report.ok and report.end.kind == "unclosed", "a build without the bug has no divergence"
