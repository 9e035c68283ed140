"""Minimizes logs of asynchronous scheduling and of hybrid KV groups in vLLM's environment. `make vllm` runs
these tests.
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

pytest.importorskip("vllm.version")  # `import vllm` could import the folder tests/vllm instead

from examples.vllm_faults.lost_rows import LosesRows
from examples.vllm_faults.recorded_run import record_random_requests
from examples.vllm_faults.table import MOST_REQUESTS
from mmengine.cli.main import app
from tests.vllm.faulty_classes import LosesRowsAhead
from tests.vllm.test_vllm_fault_examples import run_test

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
RUNS = {
    "asynchronous": (LosesRowsAhead, {"overlaps": True}),
    "hybrid groups": (LosesRows, {"window": 64, "num_blocks": 60}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_fault_is_minimized(tmp_path, monkeypatch, run):
    fault, settings = RUNS[run]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "log")])
    record_random_requests(fault, 1, max_num_seqs=3, steps=90, **settings)
    name, small = f"{fault.__module__}:{fault.__qualname__}", tmp_path / "small"
    command = ["log", "minimize", str(tmp_path / "log"), "--with", name, "-o", str(small), "--json"]
    with redirect_stdout(StringIO()) as printed:
        app([*command, "--seconds", "120"], standalone_mode=False)
    found = json.loads(printed.getvalue())
    print(f"\n{run}: {found['requests_before']} requests, {found['requests']} left, {found['seconds']} s")
    assert found["failure"] == "divergence" and found["requests"] <= MOST_REQUESTS < found["requests_before"]
    alone = run_test(small)
    assert alone.returncode == 0, alone.stdout + alone.stderr
