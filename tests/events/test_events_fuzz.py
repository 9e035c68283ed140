"""Runs the log reader's fuzzer: a few runs in the usual tests, and a minute in `make soak`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import WITH_OWN_PEAK

ROOT = Path(__file__).resolve().parents[2]
needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed; it is part of the extra `test`",
)


def fuzz(folder, *options):
    command = [*WITH_OWN_PEAK, sys.executable, "-m", "tests.events.fuzz_reader", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@needs_atheris
def test_the_fuzzer_finds_nothing_at_once(tmp_path):
    done = fuzz(tmp_path / "corpus", "-runs=1500", f"-artifact_prefix={tmp_path}/")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 1500 runs" in done.stderr


@pytest.mark.soak
@needs_atheris
def test_the_fuzzer_finds_nothing_in_a_minute(tmp_path):
    done = fuzz(tmp_path / "corpus", "-max_total_time=60", f"-artifact_prefix={tmp_path}/")
    assert done.returncode == 0, done.stderr[-2000:]
    runs = int(done.stderr.rsplit("Done ", 1)[1].split()[0])
    assert runs > 1000
