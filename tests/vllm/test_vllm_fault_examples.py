"""Runs examples/vllm_faults in vLLM's environment. All of them use recorded_run; two use served_script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")  # `vllm` alone would find this folder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def run(module, *arguments):
    """Run a module of the examples and return its output."""
    command = [sys.executable, "-m", f"examples.vllm_faults.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module, verdict",
    [
        ("draft_budget", "BROKEN at step 10, after record 53, Admitted: invariant budgets"),
        ("double_free", "Admitted: invariant blocks"),
        ("encoder_reference", "DIVERGED at step 135, record 440: Scheduled, field rows"),
        ("chunk_livelock", "agree with the rules of vllm"),
    ],
)
def test_a_fault_is_named(tmp_path, module, verdict):
    assert verdict in run(module, tmp_path / "log")


@pytest.mark.parametrize(
    "module, name, field",
    [("priority_victim", "PreemptsTheNewest", "preempted"), ("lost_rows", "LosesRows", "admitted")],
)
def test_a_fault_is_minimized_on_the_faulty_scheduler(tmp_path, module, name, field):
    log = tmp_path / "log"
    assert f"Scheduled, field {field}" in run(module, log)
    found = run("minimize", log, f"examples.vllm_faults.{module}:{name}", tmp_path / "small")
    assert int(found.partition("requests became ")[2].split()[0]) <= 6, found
    assert (tmp_path / "small" / "test_minimized_divergence.py").exists()
