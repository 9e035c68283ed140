"""Tests that `verify` uses the rules of the recorded vLLM version to derive the decisions in a log from vLLM.

vLLM 0.32 served a small checkpoint for the recording: 20 requests, 12 with images, 10 preemptions.
"""

import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from mmengine.cli.main import app
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay import request_lines, verify
from tests.events.logs import rewrite
from tests.replay.vllm_recordings import write_log

RECORDING = Path(__file__).parent / "recordings" / "vllm_0.32.jsonl.gz"
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def lines():
    with gzip.open(RECORDING) as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def folder(lines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "log"
    write_log(lines, folder)
    return folder


@pytest.fixture(scope="module")
def records(folder):
    return list(LogReader(folder))


def changed(records, index, event):
    copy = list(records)
    record = records[index]
    copy[index] = type(record)(record.sequence, record.step, record.mono_ns, event, record.offset)
    return copy


def find(records, kind, test=lambda event: True):
    return next(n for n, each in enumerate(records) if isinstance(each.event, kind) and test(each.event))


def of_host(records, host, **fingerprints):
    return changed(records, 0, replace(records[0].event, host=host, fingerprints=fingerprints))


def test_every_call_agrees_with_the_rules_of_the_recorded_version(folder):
    report = verify(folder)
    assert report.ok and report.rederived and report.rules == "vllm 0.32" and not report.caveat
    assert (report.calls, report.steps, report.unfinished) == (197, 197, [])
    assert {line.finish_reason for line in request_lines(folder)} == {"length", "stop", "abort"}


def test_other_rules_differ_where_the_encoder_holds_back_a_request(records, tmp_path):
    """If a waiting request does not fit in the encoder cache, vLLM 0.32 stops admitting, and 0.33 skips the
    request.
    """
    report = verify(rewrite(of_host(records, "vllm 0.33.0"), tmp_path / "log"))
    found = report.divergence
    assert (report.calls, found.step, found.field) == (78, 78, "admitted")
    assert (found.logged, found.derived) == ([], ["r16-b83d1eab"])
    assert "leave room for r16-b83d1eab, so the rules admit this request" in found.rule


@pytest.mark.parametrize(
    ("host", "rules", "calls"), [("vllm 0.31.4", "vllm 0.32", 197), ("vllm 0.40.0rc1", "vllm 0.33", 78)]
)
def test_an_unknown_version_is_derived_by_the_nearest_rules_and_says_so(
    records, tmp_path, host, rules, calls
):
    log = rewrite(of_host(records, host), tmp_path / "log")
    report = verify(log)
    assert (report.rules, report.calls, report.rederived) == (rules, calls, False)
    assert f"no rules of {host}; those of {rules} are the nearest" in report.caveat
    result = CliRunner().invoke(app, ["log", "verify", str(log)])
    assert result.exit_code == 5 and "the nearest" in result.stdout.replace("\n", " ")


@pytest.mark.parametrize("feature", ["pipeline parallel", "hybrid KV groups"])
def test_a_feature_without_rules_is_folded_and_named(records, tmp_path, feature):
    log = rewrite(of_host(records, "vllm 0.32.0", not_derived=feature), tmp_path / "log")
    report = verify(log)
    assert (report.ok, report.rederived, report.calls, report.steps) == (True, False, 0, 197)
    result = CliRunner().invoke(app, ["log", "verify", str(log)])
    assert result.exit_code == 5
    assert f"not derived: the rules here do not model {feature}" in " ".join(result.stdout.split())


def test_a_wrong_victim_is_named(records, tmp_path):
    index = find(records, ev.Preempted)
    event = records[index].event
    other = next(
        each.event for each in records[:index][::-1]
        if isinstance(each.event, ev.Admitted) and each.event.request_id != event.request_id
    )  # fmt: skip
    wrong = replace(event, request_id=other.request_id, row=other.row)
    found = verify(rewrite(changed(records, index, wrong), tmp_path / "log")).divergence
    assert (found.step, found.field) == (records[index].step, "preempted")
    assert (found.logged, found.derived) == ([other.request_id], [event.request_id])
    assert "self.running[-1]" in found.rule


def test_a_block_of_another_request_is_named(records, tmp_path):
    index = find(records, ev.Scheduled, lambda event: len(event.new_blocks) == 4)
    block = (np.frombuffer(records[index].event.new_blocks, np.int32) + 1).tobytes()
    wrong = changed(records, index, replace(records[index].event, new_blocks=block))
    found = verify(rewrite(wrong, tmp_path / "log")).divergence
    assert (found.step, found.field) == (records[index].step, "blocks") and "free queue" in found.rule


def test_a_missing_end_is_named(records, tmp_path):
    index = find(records, ev.Finished, lambda event: event.reason == "length")
    found = verify(rewrite(records[:index] + records[index + 1 :], tmp_path / "log")).divergence
    assert found.derived == f"Finished {records[index].event.request_id} (length)"


def test_the_difference_is_printed_with_its_rule(records, tmp_path):
    log = rewrite(of_host(records, "vllm 0.33.0"), tmp_path / "log")
    result = CliRunner().invoke(app, ["log", "verify", str(log)])
    assert result.exit_code == 3 and "likely rule" in result.stdout and "vllm 0.33.0" in result.stdout
    line = json.loads(CliRunner().invoke(app, ["log", "verify", str(log), "--json"]).stdout)
    assert (line["host"], line["calls"], line["divergence"]["field"]) == ("vllm 0.33.0", 78, "admitted")


RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("vllm_03*"))


@pytest.mark.parametrize("log", RECORDINGS, ids=lambda log: log.name)
def test_every_recorded_call_agrees(log):
    """vLLM's own scheduler ran random workloads without a model for these logs. Each log has preemptions."""
    report = verify(log)
    assert report.ok and report.rederived and report.calls >= report.steps > 20 and not report.unfinished
    events = [record.event for record in LogReader(log)]
    assert any(isinstance(event, ev.Preempted) for event in events)
    assert any(isinstance(event, ev.Dispatched) for event in events) == ("async" in log.name)


@pytest.mark.parametrize("name", ["vllm_032_priority", "vllm_033_async_eagle"])
def test_the_other_commands_read_a_recorded_log(name, tmp_path):
    log = str(next(each for each in RECORDINGS if each.name == name))
    preempted = next(each.event for each in LogReader(Path(log)) if isinstance(each.event, ev.Preempted))
    for words in (
        ["show", log],
        ["show", log, "--steps"],
        ["why", log, preempted.request_id],
        ["report", log, "-o", str(tmp_path / "report.html")],
        ["redact", log, str(tmp_path / "redacted")],
    ):
        result = CliRunner().invoke(app, ["log", *words])
        assert result.exit_code == 0, (words, result.output)
        if words[0] == "why":
            assert "Preempted" in result.output
    assert verify(tmp_path / "redacted").calls == verify(Path(log)).calls


def test_a_row_without_a_request_is_named(records, tmp_path):
    index = find(records, ev.Preempted)
    after = index + find(records[index:], ev.Scheduled)
    rows = np.array([records[index].event.row], np.int32).tobytes()
    wrong = changed(records, after, replace(records[after].event, rows=rows, num_tokens=None, new_blocks=b""))
    found = verify(rewrite(wrong, tmp_path / "log")).divergence
    assert found.field == "rows" and "which no request has" in found.logged[0][0]


def test_requests_that_are_never_admitted_are_named(lines, tmp_path):
    """A scheduler that hangs writes no event, so its log just ends."""
    last = max(n for n, line in enumerate(lines) if line["op"] == "add")
    end = last + next(n for n, line in enumerate(lines[last:]) if line["op"] == "schedule")
    waits = lines[last] | {"id": "hung"}
    lonely = [lines[0], waits]
    write_log(lonely, tmp_path / "log")
    report = verify(tmp_path / "log")
    assert report.ok and report.left_over == ["hung"]
    result = CliRunner().invoke(app, ["log", "verify", str(tmp_path / "log")])
    assert "the rules schedule hung; if vllm 0.32.0 went on running" in result.stdout.replace("\n", " ")
    write_log(lines[:end], tmp_path / "running")
    assert verify(tmp_path / "running").left_over


def test_the_invariants_of_the_recorded_state_are_checked(records, folder, tmp_path):
    """A block that two requests hold breaks an invariant."""
    assert verify(folder, invariants=True).ok
    index = find(records, ev.Scheduled, lambda event: len(event.new_blocks) == 4)
    admitted = next(each.event for each in records if isinstance(each.event, ev.Admitted))
    held = replace(records[index].event, new_blocks=admitted.new_blocks[:4])
    log = rewrite(changed(records, index, held), tmp_path / "log")
    found = verify(log, invariants=True).divergence
    assert (found.sequence, found.field.split()[0]) == (index, "invariant")
    assert CliRunner().invoke(app, ["log", "verify", str(log), "--invariants"]).exit_code == 3


def test_a_setting_without_rules_is_named(records, tmp_path):
    log = rewrite(of_host(records, "vllm 0.32.0", **{"vllm.hash_block_size": "16"}), tmp_path / "log")
    assert "do not model hash_block_size 16" in verify(log).caveat
