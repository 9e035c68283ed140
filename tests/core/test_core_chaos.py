"""Runs `chaos.py` with several seeds. The script simulates an engine with every kind of fault."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.core.chaos import FAULTS, check_seed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(6, 24))
def test_no_request_is_lost(seed, tmp_path):
    check_seed(seed, tmp_path / "log")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_no_request_is_lost_in_the_long_run(seed, tmp_path):
    check_seed(seed, tmp_path / "log")


@pytest.mark.long
def test_every_fault_is_met(tmp_path):
    met = Counter()
    for seed in range(6):
        met += check_seed(seed, tmp_path / str(seed))
    assert not set(FAULTS) - set(met)


def test_a_failure_names_the_command_that_shows_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.core.chaos.reference_tokens", lambda *args, **options: ([-1], "stop"))
    with pytest.raises(AssertionError) as raised:
        check_seed(3, tmp_path / "log")
    (note,) = raised.value.__notes__
    command = note.split(": ", 1)[1].split()
    assert command[:3] == ["python", "-m", "tests.core.chaos"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("seed 3: {") and "1 seeds hold" in lines
    assert sum(" Executed " in line for line in lines) > 10
