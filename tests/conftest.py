"""What holds for all tests."""

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

# What `make test` got for these tests, behind whatever else is installed.
sys.path.append(str(ROOT / "build" / "gpu"))
# Triton reads this when it is imported, which other packages may do. Without a GPU its kernels run in Python.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# FlashInfer makes folders where it is imported, else in the user's home.
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(ROOT / "build"))

# Machines are slow, and busy: no test fails for the time that it takes.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Zeros for a pool of 256 MiB cost more than all else of an engine's start.
sizing.CPU_MIN_BYTES = 64 * 2**20

# A shell starts background jobs with SIGINT ignored, and children inherit that: a test that interrupts
# one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules with a fixture that takes long: one worker runs all tests of a module, or of several that share one.
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
    """For `--dist loadgroup`, whose marks pytest-xdist 3.8 loses under pytest 9: groups go first, then all
    other tests one by one."""
    from xdist.scheduler import LoadScopeScheduling  # lazy: not everybody has it

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, name = nodeid.partition("::")
            if file.startswith(CONTRACTS):  # each class makes a checkpoint once, for all of its tests
                return f"{file}::{name.partition('::')[0]}"
            return TOGETHER.get(file, nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish(session):
    """What was imported and collected stays: the garbage collector goes through millions of objects less."""
    gc.collect()
    gc.freeze()


@contextmanager
def _hidden(folder):
    """In here no compiler is found, and nothing compiled before either."""
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
    """The compiled kernels, for one instruction set of this CPU after the other."""
    return opened(request.param)


@pytest.fixture(scope="session")
def kernel_device():
    """Where Triton's kernels run: a GPU, or a CPU through Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("no Triton here; `make test` gets it into build/gpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dots_in_order(kernel_device, monkeypatch):
    """Sums of tl.dot run along the depth, one product after the other, wherever an element stands. The
    interpreter leaves them to BLAS, which rounds an element by its place in the tile; a GPU does not."""
    if kernel_device.type == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)


def _dot_in_order(builder, a, b, d, *_):
    """Rows and columns of zeros are left out where that changes nothing: they are most of what tests have."""
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
    """Puts a distribution "strange" 1.2 on the path, whose entry points in a group give attributes of one
    module. `code`: the module's; `names`: the attributes, by the entry points' names."""
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
