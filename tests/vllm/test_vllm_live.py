"""Tests the recorder in a running vLLM with the included checkpoint. `make vllm` runs these tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")  # `vllm` alone could also name the folder tests/vllm

from mmengine.events import vocabulary as ev
from mmengine.replay import verify
from mmengine.replay.checked_log import CheckedLog

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
HERE = Path(__file__).parents[2]
OWN = {"mmengine-vl", "mmengine-vllm"}


def run(folder, scheduler, *arguments, processes=False, **environment):
    """Run vLLM in a separate process. Returns the answers and the printed text."""
    settings = {
        "MMENGINE_LOG": str(folder / "log"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE / "plugins"))),
        "VLLM_LOGGING_LEVEL": "INFO",  # an earlier import of mmengine_vllm.deriving may have set ERROR
        **environment,
    }
    command = [sys.executable, "-m", "tests.vllm.live_run", scheduler, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    return json.loads(line.removeprefix("ANSWERS ")), done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    answers, printed = run(folder, "mmengine_vllm.RecordingScheduler")
    return folder / "log", answers, printed


def test_a_recorded_run_verifies(recorded):
    folder, answers, printed = recorded
    report = verify(folder)
    assert report.divergence is None, report.divergence
    assert report.rederived and report.requests == 20 and not report.unfinished
    events = [record.event for record in CheckedLog(folder)]
    kinds = {type(event) for event in events}
    assert {ev.Preempted, ev.Evicted, ev.Cancelled} <= kinds and len(answers) == 18
    assert f"mmengine_vllm records to {folder}" in printed


def test_recording_changes_no_answer(recorded, tmp_path):
    _, answers, _ = recorded
    assert run(tmp_path, "vllm.v1.core.sched.scheduler.Scheduler")[0] == answers


def test_the_ring_is_dumped_by_a_signal(tmp_path):
    run(tmp_path, "mmengine_vllm.RecordingScheduler", "--dump", MMENGINE_LOG_RING_SECONDS="1")
    log = CheckedLog(tmp_path / "log")
    state = log.first_state()
    for record in log:
        with log.naming(record):
            log.apply(state, record.event)
    assert log.findings.listed == [] and log.started.fingerprints["dumped"] == "SIGUSR1"


def test_the_engine_in_a_process_of_its_own_records_too(tmp_path):
    run(tmp_path, "mmengine_vllm.RecordingScheduler", "--num", "5", processes=True)
    assert verify(tmp_path / "log").divergence is None


def test_installing_the_plugin_changed_no_version():
    """The installed versions and `pip check` are the same before and after the plugin's installation.

    A new process reads the versions, because importing setuptools adds its vendored packages to the list.
    """
    before = json.loads((HERE / "build/vllm/before.json").read_text())
    command = [sys.executable, str(HERE / "tests/vllm/installed.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    now, versions = json.loads(done.stdout), before["versions"]
    assert {name: now["versions"].get(name) for name in versions} == versions
    assert now["versions"].keys() >= OWN
    new = set(now["check"].splitlines()) - set(before["check"].splitlines())
    assert new <= {"No broken requirements found."}
