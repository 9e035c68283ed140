"""Fixtures and settings for all tests."""

import gc
import os
import signal
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from mmengine.native import library as native_library
from mmengine.runtime.startup import sizing
from tests.instruction_sets import isas, opened

ROOT = Path(__file__).resolve().parents[1]

# Packages that `make test` fetched for these tests, after the installed ones.
sys.path.append(str(ROOT / "build" / "gpu"))
# Triton reads this on import, which other packages may trigger. Without a GPU its kernels run in Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# FlashInfer creates folders on import, by default in the user's home.
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(ROOT / "build"))

# Test machines are slow and busy: no test fails because of its duration.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Zeroing a pool of 256 MiB takes longer than the rest of an engine's start.
sizing.CPU_MIN_BYTES = 64 * 2**20

# A shell starts background jobs with SIGINT ignored, and children inherit this: a test that interrupts a
# child would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules with a slow fixture: one worker runs all tests of a module, or of several that share the fixture.
TOGETHER = {
    "tests/test_debugging.py": "debugging",
    "tests/benchmarks/test_throughput.py": "throughput",
    "tests/cli/test_cli_laptop.py": "laptop",
    "tests/gguf/test_gguf_vocabularies.py": "vocabularies",
    "tests/project/test_docs_run.py": "docs",
    "tests/project/test_limits_page.py": "limits page",
    "tests/llama/test_smollm2_answers.py": "smollm2",
    "tests/parity/test_parity.py": "parity",
    "tests/parity/test_parity_as_on_a_gpu.py": "parity",
    "tests/server/test_server_command.py": "server",
    "tests/spec_decode/test_draft_overlap.py": "draft overlap",
}
CONTRACTS = "tests/models/test_contract_"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedule tests for `--dist loadgroup`: groups first, then all other tests one by one. pytest-xdist 3.8
    loses the group marks under pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling  # lazy: an optional package

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, name = nodeid.partition("::")
            if file.startswith(CONTRACTS):  # each class makes one checkpoint for all its tests
                return f"{file}::{name.partition('::')[0]}"
            return TOGETHER.get(file, nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish(session):
    """Freeze imported and collected objects, so that the garbage collector skips millions of them."""
    gc.collect()
    gc.freeze()


@contextmanager
def _hidden(folder):
    """Hide every compiler, and everything compiled before, inside this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        patch.setenv("MMENGINE_CACHE", str(folder))
        native_library.forget()
        try:
            yield
        finally:
            patch.undo()
            native_library.forget()


@pytest.fixture(scope="session")
def hidden_compiler():
    return _hidden


@pytest.fixture(scope="module", params=isas())
def library(request):
    """Yield the compiled kernels, for each instruction set of this CPU."""
    return opened(request.param)


@pytest.fixture(scope="session")
def kernel_device():
    """Return the device for Triton's kernels: a GPU, or a CPU through Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; `make test` fetches it into build/gpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dots_in_order(kernel_device, monkeypatch):
    """Sum tl.dot along the depth, one product after another, for every element. The interpreter uses BLAS
    instead, which rounds an element by its place in the tile; a GPU does not.
    """
    if kernel_device.type == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)


def _dot_in_order(builder, a, b, d, *_):
    """Compute tl.dot in order; rows and columns of zeros are skipped where the result is the same, since
    tests consist mostly of zeros.
    """
    total, left, right = d.data.copy(), a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    is_odd = not np.isfinite(right).all()
    rows = (left.any(1) | is_odd).nonzero()[0]
    found, left = total[rows], left[rows]
    for place in (left.any(0) | is_odd).nonzero()[0]:
        found += left[:, place, None] * right[place]
    total[rows] = found
    return type(d)(total, d.dtype.scalar)


@pytest.fixture
def install_stranger(tmp_path, monkeypatch):
    """Install a distribution "strange" 1.2, whose entry points in a group give attributes of one module.
    `code`: the module's source; `names`: the attributes, by entry point name.
    """
    site = tmp_path / "site"

    def install(group, code, **names):
        info = site / "strange-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.2\n")
        points = "".join(f"{name} = strange_module:{attribute}\n" for name, attribute in names.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
        (site / "strange_module.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))

    yield install
    sys.modules.pop("strange_module", None)
