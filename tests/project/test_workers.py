"""Tests the worker processes of `pytest --workers` with a small set of tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import Queue

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def number():
    print("fixture of a module")

@pytest.mark.parametrize("each", range(4))
def test_many(number, each, tmp_path):
    print("output of", each)
    assert each != 3

def test_warning():
    warnings.warn("careful")

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.skip(reason="a reason")
def test_skipped():
    raise AssertionError

def test_after(capfd):
    os.system("echo text")
    assert capfd.readouterr().out == "text\\n"
"""


def run_pytest(folder, *words):
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "tests.workers"]
    command = [sys.executable, "-m", "pytest", *options, "--workers", "2", *words, str(folder)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_reports_of_all_workers_are_printed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(CODE)
    done = run_pytest(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 failed, 10 passed, 2 skipped, 2 warnings" in done.stdout
    for name in ("one", "two"):
        for test, outcome in (("many[3]", "FAILED"), ("killed", "FAILED"), ("after", "PASSED")):
            assert f"{outcome} test_{name}.py::test_{test}" in done.stdout
    assert "exit code -9" in done.stdout and "UserWarning: careful" in done.stdout
    assert len(re.findall("^output of 3$", done.stdout, re.MULTILINE)) == 2


def test_a_failure_stops_all_workers(tmp_path):
    for number in range(9):
        (tmp_path / f"test_{number}.py").write_text("def test(): assert False")
    done = run_pytest(tmp_path, "-x")
    assert done.returncode == 1 and "! stopping after" in done.stdout
    assert 1 <= int(re.search(r"(\d+) failed", done.stdout)[1]) <= 4


def test_a_worker_takes_one_module_and_then_helps_with_the_longest():
    queue = Queue([[[0], [1], [2], [3, 4]], [[5], [6]]])
    assert queue.next_unit("a") == [0] and queue.next_unit("b") == [5]
    assert queue.next_unit("a") == [1] and queue.next_unit("b") == [6]
    assert queue.next_unit("b") == [3, 4] and queue.next_unit("a") == [2]
    assert queue.next_unit("a") == queue.next_unit("b") == []
    queue.put_back([7, 8])
    assert queue.next_unit("b") == [7, 8]


@pytest.mark.parametrize("words", [("--collect-only",), ("--deselect", "test_one.py::test_b")])
def test_one_test_or_a_collection_starts_no_worker(tmp_path, words):
    (tmp_path / "test_one.py").write_text(
        "import os\ndef test_a(): assert os.getpid() == PID\ndef test_b(): pass\nPID = os.getpid()\n"
    )
    assert run_pytest(tmp_path, *words).returncode == 0
