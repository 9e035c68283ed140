"""Tests that the log benchmark prints its targets last. Times are not checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_ends_with_its_targets(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        ROOT / "benchmarks",
        "log",
        "--quick",
        "--json",
        "--out",
        tmp_path / "t.md",
    ]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout.splitlines()[-1])["targets"]
    assert len(targets) == 8 and all(set(each) == {"measured", "bar", "met"} for each in targets.values())
    assert all(targets[f"bytes a token at {rows} rows"]["met"] for rows in (16, 256))
    assert "SQLite WAL" in (tmp_path / "t.md").read_text()
