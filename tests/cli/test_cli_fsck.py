"""Tests `mmengine log fsck`: its output, its exit codes, and the repair."""

import json

import pytest

from tests.cli.cli_process import call_cli, loaded, run_cli
from tests.events.logs import one_of_each, segments, write_log

COUNT = 3 * len(one_of_each())


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / "log", one_of_each() * 3, segment_bytes=700)


def test_a_whole_log_and_its_contents(log):
    done = run_cli("log", "fsck", str(log), blocked=("torch", "transformers", "llguidance"))
    assert done.returncode == 0 and f"whole: {COUNT} records; closed by its writer" in done.stdout
    assert "torch" not in loaded(done)
    found = json.loads(call_cli("log", "fsck", str(log), "--json").stdout.splitlines()[0])
    assert found["exit_code"] == 0 and found["is_closed"] and not found["findings"]
    assert sum(each["records"] for each in found["segments"]) == COUNT


def test_findings_and_a_repair(log):
    last, other = segments(log)[-1], segments(log)[0]
    last.write_bytes(last.read_bytes()[:-70])
    done = call_cli("log", "fsck", str(log))
    assert done.returncode == 6 and "truncated: " in done.stdout and "cut short" in done.stdout
    done = call_cli("log", "fsck", str(log), "--repair")
    assert (
        done.returncode == 0 and "repaired: " in done.stdout and f"whole: {COUNT - 1} records" in done.stdout
    )
    data = bytearray(other.read_bytes())
    data[100] ^= 1
    other.write_bytes(data)
    done = call_cli("log", "fsck", str(log), "--json")
    assert (
        done.returncode == 4 and json.loads(done.stdout.splitlines()[0])["findings"][0]["kind"] == "checksum"
    )


def test_no_log(tmp_path):
    done = call_cli("log", "fsck", str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("mmengine: ") and "has no log" in done.stderr
