"""Tests that our tools find each fault from examples/vllm_faults in its minimized log."""

from pathlib import Path

import pytest

from mmengine.replay import replay_failure, verify
from mmengine.replay.minimize.recording import read_recording
from mmengine.replay.queries.why import why
from mmengine.replay.rerun.script import read_script
from tests.cli.console_docs import ROOT, agrees, commands, run

TUTORIAL = ROOT / "docs" / "tutorials" / "a-bad-night-of-vllm.md"
FAULTS = Path(__file__).parent / "recordings" / "faults"
MOST_REQUESTS = 6


@pytest.mark.parametrize(
    "name, field, logged, derived",
    [
        ("priority_victim", "preempted", ["r26"], ["r25"]),
        ("lost_rows", "admitted", [], ["r50"]),
        ("encoder_reference", "rows", [], [("r43", 29)]),
    ],
)
def test_a_choice_that_the_rules_do_not_make(name, field, logged, derived):
    found = verify(FAULTS / name).divergence
    assert (found.field, found.logged, found.derived) == (field, logged, derived)
    assert len(read_script(FAULTS / name).requests) <= MOST_REQUESTS


@pytest.mark.parametrize(
    "name, rule, text",
    [
        ("draft_budget", "budgets", "step 7 schedules 130 tokens of a budget of 128 (token_budget)"),
        ("double_free", "blocks", "step 132 takes block 12 as a new block, but it has 1 references"),
    ],
)
def test_a_broken_invariant(name, rule, text):
    recording = read_recording(FAULTS / name, rule)
    assert recording.failure.what == text
    assert recording.num_requests <= MOST_REQUESTS


@pytest.mark.parametrize(
    "name, request_id, kind, steps",
    [
        ("chunk_livelock_whole", "r9", "media chunk", (11, 98)),
        ("encoder_reference", "r43", "other rules", (19, 19)),
    ],
)
def test_the_reason_of_a_running_request_without_tokens(name, request_id, kind, steps):
    reasons = [each for claim in why(FAULTS / name, request_id) for each in claim.facts.get("reasons", ())]
    found = next(each for each in reasons if each["reason"] == kind)
    assert (found["first_step"], found["last_step"]) == steps


def test_the_wrong_victim_has_its_place_in_the_order():
    # `why` says how many running requests are less important than the preempted request.
    claims = why(FAULTS / "priority_victim", "r26")
    text = next(claim.text for claim in claims if claim.kind == "preemption")
    assert "The victim: priority 0, 1 of 2 running requests are less important." in text


def test_a_livelock_in_the_rules_themselves():
    failure = replay_failure(FAULTS / "chunk_livelock", "stalled")
    assert failure.kind == "stalled" and "0 requests run, 2 wait" in failure.what
    assert len(read_script(FAULTS / "chunk_livelock").requests) == 2


def test_the_tutorial_shows_the_printed_output(tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    shown = commands(TUTORIAL.read_text())
    assert len(shown) == 5
    for command, lines in shown:
        printed = run(command, tmp_path)
        assert agrees(lines, printed), (command, printed)
