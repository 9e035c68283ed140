"""Tests that the batch supervisor restarts its process after a hang or a crash in native code. The faulty
request ends with an error, and the other requests get their normal answers.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmengine.cli import memory_kills, supervisor
from mmengine.cli.batch import HAS_ERRORS
from mmengine.errors import MMEngineError
from mmengine.events import vocabulary as ev
from mmengine.events.log import LogReader
from mmengine.replay.verify import verify
from tests.cli.test_cli_kill import log_size

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from mmengine.cli.batch import run_batch_file
from mmengine.cli.supervisor import obey_supervisor, ended_by
from mmengine.serve.engine.engine import Engine
from tests.serve import serve_fakes as fakes

obey_supervisor()
folder, how = Path(sys.argv[1]), sys.argv[2]
dispatch, collect = fakes.EchoExecutor.dispatch, fakes.EchoExecutor.collect

def note(self, plan):
    dispatch(self, plan)
    self.names = {self._rows[row].request_id for row in plan.rows.tolist()}

def kill(self):
    if "killer" in self.names and how == "hang":
        time.sleep(1000)
    if "killer" in self.names and how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if "killer" in self.names and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "slow":
        time.sleep(0.02)
    return collect(self)

fakes.EchoExecutor.dispatch, fakes.EchoExecutor.collect = note, kill

def make_engine(resume):
    resume = resume and replace(resume, cause=ended_by())
    builder = fakes.builder(step_timeout_s=1, max_num_seqs=8)
    return Engine(builder=builder, log=folder / "log", resume=resume)

sys.exit(run_batch_file(folder / "r", folder / "a", folder / "log", make_engine))
"""

DECODER = CHILD.replace(
    "def make_engine",
    """
prepare = fakes.EchoProcessor.prepare

def crash(self, messages, **options):
    if "crash" in messages[-1]["content"]:
        time.sleep(0.3)
        signal.raise_signal(signal.SIGSEGV)
    return prepare(self, messages, **options)

fakes.EchoProcessor.prepare = crash

def make_engine""",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", CHILD, str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'plugins'}")
    return tmp_path


def write(folder, names):
    lines = [
        {"custom_id": name, "messages": [{"role": "user", "content": f"text of {name}"}], "max_tokens": 30}
        for name in names
    ]
    (folder / "r").write_text("\n".join(map(json.dumps, lines)))


def answers(folder):
    found = [json.loads(line) for line in (folder / "a").read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in found}
    assert len(by_id) == len(found), "a request has two answers"
    return by_id


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_the_failing_request_is_found_and_the_others_continue(folder, how, capfd):
    names = ["a", "b", "killer", "c", "d"]
    write(folder, names)
    size = lambda: (folder / "a").stat().st_size if (folder / "a").exists() else 0  # noqa: E731
    assert supervisor.supervise([how], size) == HAS_ERRORS
    found = answers(folder)
    assert set(found) == set(names)
    assert all(found[name]["text"] == f"TEXT OF {name.upper()}" for name in names if name != "killer")
    assert (
        "hang: a step made no progress" in found["killer"]["error"] or "SIGSEGV" in found["killer"]["error"]
    )
    events = [record.event for record in LogReader(folder / "log")]
    failed, recovered = (sum(isinstance(e, kind) for e in events) for kind in (ev.Failed, ev.Recovered))
    assert failed == recovered <= 4, (
        "the failing request is found in at most four failed steps: with five rows, two, one, and this one"
    )
    report = verify(folder / "log")
    assert report.ok and not report.unfinished
    assert "starting again" in capfd.readouterr().err


def test_a_media_decoder_crash_blames_no_step(folder, monkeypatch):
    """The running requests are not blamed. The batch ends after a few restarts."""
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", DECODER, str(folder)))
    write(folder, ["a", "b", "crash", "d"])
    with pytest.raises(MMEngineError, match="after 2 restarts .* SIGSEGV while it read an image or a video"):
        supervisor.supervise(["slow"], lambda: 0)
    events = [record.event for record in LogReader(folder / "log")]
    assert not any(isinstance(event, ev.Failed) for event in events)


def test_restarts_stop_without_progress(folder, monkeypatch):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(supervisor, "MAX_RESTARTS", 3)
    with pytest.raises(MMEngineError, match="3 restarts without a new answer: the process died from SIGABRT"):
        supervisor.supervise([], lambda: 0)


@pytest.mark.parametrize("code, seen", [(0, 0), (2, 2), (130, 130), (-signal.SIGKILL, 137)])
def test_other_exit_codes_are_returned(monkeypatch, code, seen):
    end = f"import os, sys; os.kill(os.getpid(), {-code}) if {code} < 0 else sys.exit({code})"
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", end))
    assert supervisor.supervise([], lambda: 0) == seen


HOLDS = "held = bytearray(200 * 2**20); held[::4096] = b'x' * len(held[::4096]); "


@pytest.mark.parametrize(
    "kills, said",
    [
        (None, "killed (SIGKILL), probably by the kernel, for memory"),
        (1, "killed (SIGKILL), by the kernel, for memory"),
        (0, "killed (SIGKILL), but not for memory"),
    ],
)
def test_an_out_of_memory_kill_is_reported(monkeypatch, capfd, kills, said):
    """`kills`: increase of the kernel's counter of out-of-memory kills; None: no counter."""
    counts = iter([3, 3 + kills] if kills is not None else [None, None])
    monkeypatch.setattr(supervisor, "num_memory_kills", lambda: next(counts))
    end = f"import os, signal; {HOLDS} os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(supervisor, "COMMAND", (sys.executable, "-c", end))
    assert supervisor.supervise([], lambda: 0) == 137
    printed = capfd.readouterr().err
    assert said in printed and "the same command continues" in printed
    held = float(re.search(r"its peak memory was ([0-9.]+) GiB", printed)[1])
    # A child's peak memory includes the memory of its parent at the fork, here the test process.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert 0.19 < held < max(0.5, own + 0.2)


def test_a_killed_batch_resumes_with_the_same_command(folder, capfd, monkeypatch):
    names = ["a", "b", "killer", "c"]
    write(folder, names)
    assert supervisor.supervise(["kill"], lambda: 0) == 137
    assert "killed (SIGKILL)" in capfd.readouterr().err
    assert supervisor.supervise(["fine"], lambda: 0) == 0
    assert {name: answer["text"] for name, answer in answers(folder).items()} == {
        name: f"TEXT OF {name.upper()}" for name in names
    }


CGROUPS = {
    "2": ("0::/a/b\n", {"a/b/memory.events": "low 0\noom 2\noom_kill 5\n"}, 5),
    "2, in a container": ("0::/a/b\n", {"memory.events": "oom_kill 4\n"}, 4),
    "1": (
        "4:memory:/a\n0::/\n",
        {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"},
        7,
    ),
    "1, an old kernel": ("4:cpu,memory:/a\n0::/\n", {"memory/memory.oom_control": "under_oom 0\n"}, None),
    "none": ("0::/\n", {}, None),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_the_kernels_count_of_kills_for_memory(tmp_path, monkeypatch, version):
    own, files, count = CGROUPS[version]
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory_kills, "CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_kills, "MOUNT", tmp_path)
    assert memory_kills.num_memory_kills() == count
    monkeypatch.setattr(memory_kills, "CGROUPS", tmp_path / "missing")
    assert memory_kills.num_memory_kills() is None


def supervisor_of(folder, how, **options):
    code = (
        "import sys\nfrom mmengine.cli import supervisor\n"
        f"supervisor.COMMAND = (sys.executable, '-c', {CHILD!r}, {str(folder)!r})\n"
        f"sys.exit(supervisor.supervise([{how!r}], lambda: 0))"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **options)


def test_the_child_does_not_outlive_its_supervisor(folder):
    write(folder, [f"r{k}" for k in range(200)])
    process = supervisor_of(folder, "slow")
    deadline = time.monotonic() + 60
    while not (folder / "a").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    sizes = [-1, log_size(folder / "log")]
    while sizes[-1] != sizes[-2]:  # On a busy machine the child may end late.
        time.sleep(0.3)
        sizes.append(log_size(folder / "log"))
    assert (folder / "a").read_text().count("\n") < 200, "the child ended before it had answered all requests"
    process = supervisor_of(folder, "fast")
    assert process.wait(60) == 0 and len(answers(folder)) == 200


def test_a_signal_to_the_supervisor_reaches_the_child(folder):
    write(folder, [f"r{k}" for k in range(200)])
    process = supervisor_of(folder, "slow", stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not ((folder / "a").exists() and answers(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130 and b"finishing running requests" in printed
    assert 0 < len(answers(folder)) < 200
