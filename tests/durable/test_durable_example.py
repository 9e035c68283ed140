"""Tests examples/killed_server.py."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "examples" / "killed_server.py")]


def test_help_names_the_options():
    done = subprocess.run([*SCRIPT, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert "--streams" in done.stdout and "SIGKILL" in done.stdout


def test_without_openais_client_the_error_names_the_venv():
    hidden = "import runpy, sys; sys.modules['openai'] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", hidden, SCRIPT[1]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and ".venv/bin/python" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.soak
def test_all_streams_finish_after_two_kills():
    words = [*SCRIPT, "--streams", "6", "--kills", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"kill -9 (\d+): [1-6] streams open", done.stdout)) == 2
    assert re.search(r"[1-6] streams broke and continued; 6 of 6 answers are complete", done.stdout)


@pytest.mark.soak
def test_ctrl_c_ends_the_script_and_its_server():
    process = subprocess.Popen(
        [*SCRIPT, "--streams", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    port = int(re.search(r"port (\d+)", process.stdout.readline()).group(1))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said, said
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert port
