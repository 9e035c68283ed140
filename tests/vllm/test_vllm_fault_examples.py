"""Tests that the faults of examples/vllm_faults are recorded, named and minimized in vLLM's environment.

The faults are priority_victim, draft_budget, double_free, lost_rows, encoder_reference and chunk_livelock,
recorded by recorded_run.py or served_script.py. The tests that `log minimize` writes must run without
mmengine and its plugin.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")  # `vllm` alone would match the folder tests/vllm

from vllm.version import __version__

from examples.vllm_faults.table import FAULTS, FORMAT, MOST_REQUESTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
NAMED = {
    "priority_victim": ("preempted", "preempted"),
    "draft_budget": ("invariant budgets", "budgets"),
    "double_free": ("invariant blocks", "blocks"),
    "lost_rows": ("admitted", "admitted"),
    "encoder_reference": ("rows", "rows"),
    "chunk_livelock": ("invariant progress", "stalled"),
}
# Runs pytest with an import finder that hides mmengine.
_ALONE = """
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mmengine", "mmengine_vllm", "tests"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuses())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--noconftest", "--rootdir", sys.argv[1], sys.argv[1]]))
"""


def run_test(folder, name=""):
    """Run the minimized test without mmengine. `name`: the scheduler class ("": vLLM's own scheduler)."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    second = [str(ROOT / path) for path in paths if "second" in path]  # PYTHONPATH may have relative paths
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*second, str(ROOT)]), "SCHEDULER_CLASS": name}
    command = [sys.executable, "-c", _ALONE, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_minimized(tmp_path, fault):
    if fault == "chunk_livelock" and __version__.startswith("0.32"):
        pytest.skip("vLLM 0.32 serves these requests")
    command = [sys.executable, "-m", "examples.vllm_faults.table", fault, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    field, check = NAMED[fault]
    line = done.stdout.splitlines()[-1]
    print(f"\nvllm {__version__}: {line}")
    assert f"{field} " in line and FORMAT.format(fault, *[""] * 7)[:19] in line
    small = tmp_path / f"{fault}_small"
    text = (small / f"test_minimized_{check}.py").read_text()
    assert "import mmengine" not in text and "from mmengine" not in text
    assert text.count('"add", ') <= MOST_REQUESTS
    alone = run_test(small)
    if not FAULTS[fault]:
        assert alone.returncode == 1 and "nothing is scheduled" in alone.stdout, alone.stdout + alone.stderr
        return
    assert alone.returncode == 0, alone.stdout + alone.stderr
    name = f"examples.vllm_faults.{fault}:{FAULTS[fault]}"
    found = run_test(small, name)
    assert found.returncode == 1 and "AssertionError: call " in found.stdout, found.stdout + found.stderr
