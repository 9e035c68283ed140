"""Tests benchmarks/core/resume.py: a process that continues a long log reads only the log's end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.soak
def test_going_on_reads_the_end_of_a_log(tmp_path):
    words = [sys.executable, BENCHMARKS, "resume", "--quick", "--json", "--folder", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    print(done.stdout)
    whole, snapshot = found["whole"], found["snapshot"]
    assert (snapshot["live"], snapshot["answers"]) == (whole["live"], whole["answers"]) and snapshot[
        "live"
    ] == 50
    assert snapshot["bytes"] < whole["bytes"] / 2 and snapshot["cpu_s"] < min(2, whole["cpu_s"])
