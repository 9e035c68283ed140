"""Tests that this build continues a killed process's log, and finishes its 50 live requests."""

import json
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from mmengine.core.continuation import open_log
from mmengine.core.resume import Resume
from mmengine.errors import ConfigError, LogError
from mmengine.events import vocabulary as ev
from mmengine.events.fsck import fsck
from mmengine.events.log import LogReader
from mmengine.replay import verify
from mmengine.simulation.simulated_executor import SimulatedExecutor
from tests.golden.make_killed import FINGERPRINTS, NUM_LIVE, config

GOLDEN = Path(__file__).parent / "killed"
ANSWERS = json.loads((GOLDEN / "answers.json").read_text())["answers"]


@pytest.fixture
def folder(tmp_path):
    ignore = shutil.ignore_patterns("answers.json")
    return shutil.copytree(GOLDEN, tmp_path / "log", ignore=ignore)


def test_each_request_ends_once_with_the_tokens_of_an_undisturbed_run(folder):
    opened = open_log(folder, Resume(), config())
    resumed = opened.resumed
    assert set(resumed.answers) == set(ANSWERS) and len(resumed.state.requests) == NUM_LIVE
    assert any(answer.reason for answer in resumed.answers.values()), (
        "some requests have ended and were not delivered"
    )
    assert all(not answer.queued.outputs for answer in resumed.answers.values())
    opened.check_fingerprints(FINGERPRINTS, None)
    now = resumed.config_for(config())
    core = opened.core(now, SimulatedExecutor(now, eos_in=200, check_kv=True), FINGERPRINTS)
    core.recover(resumed.recovered(()))
    while core.has_work:
        for output in core.step():
            resumed.answers[output.request_id].add(output)
    told = {name: [each.token_ids, each.reason, each.detail] for name, each in resumed.answers.items()}
    assert told == ANSWERS
    for name in ANSWERS:
        core.delivered(name)
    core.close()
    ends = Counter(
        record.event.request_id for record in LogReader(folder) if isinstance(record.event, ev.Finished)
    )
    assert set(ends.values()) == {1} and set(ANSWERS) <= set(ends)
    assert verify(folder).ok and fsck(folder).exit_code == 0
    again = open_log(folder, Resume(), config())
    assert not again.resumed.answers
    again.sink.close()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_changes_that_give_other_tokens_are_refused_by_name(folder, name):
    before = [record.event for record in LogReader(folder)]
    opened = open_log(folder, Resume(), config())
    with pytest.raises(LogError, match=rf"a different {name} \(was {FINGERPRINTS[name][:12]}, is 2222"):
        opened.check_fingerprints({**FINGERPRINTS, name: "2" * 64}, Resume())
    opened.sink.close()
    assert [record.event for record in LogReader(folder)] == before, "the log is unchanged"
    opened = open_log(folder, Resume(force=True), config())
    opened.check_fingerprints({**FINGERPRINTS, name: "2" * 64}, Resume(force=True))
    opened.sink.close()


def test_other_settings_are_refused_by_name(folder):
    with pytest.raises(ConfigError, match="begun with max_num_seqs 24, not 25"):
        open_log(folder, Resume(), replace_setting(max_num_seqs=25))
    open_log(folder, Resume(), replace_setting(log_retain_bytes=10**9)).sink.close()


def replace_setting(**settings):
    return msgspec.structs.replace(config(), **settings)
