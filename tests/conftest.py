"""Fixtures and settings for all tests."""

import gc
import os
import signal
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from mmengine.native import library as native_library
from mmengine.runtime.startup import sizing
from tests import interpreter
from tests.instruction_sets import isas, opened

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ("tests.workers",)

# `make test` fetches Triton and similar packages for the tests into build/gpu. Installed packages come first.
sys.path.append(str(ROOT / "build" / "gpu"))
# Makes torch look for GPUs without loading CUDA, because forked worker processes cannot load CUDA again.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Without a GPU, Triton kernels run in Triton's Python interpreter. Triton reads TRITON_INTERPRET at import,
# and other packages may import Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# FlashInfer creates folders at import, by default in the user's home.
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(ROOT / "build"))

# Test machines are slow and busy, so no Hypothesis test fails because of its duration.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Tests use a smaller minimum for the KV pool on a CPU. Zeroing the default minimum, 256 MiB, takes longer
# than the rest of an engine's start.
sizing.CPU_MIN_BYTES = 64 * 2**20


@cache
def _load_rfc3987():
    del sys.modules["rfc3987_syntax"]
    return import_module("rfc3987_syntax").is_valid_syntax


# jsonschema imports rfc3987_syntax for the formats iri and iri-reference. Parsing the package's grammars
# takes 4 CPU seconds, so the import waits until a test needs the package.
if find_spec("rfc3987_syntax") is not None:
    sys.modules["rfc3987_syntax"] = SimpleNamespace(is_valid_syntax=lambda *given: _load_rfc3987()(*given))

# A shell starts background jobs with SIGINT ignored, and child processes inherit this setting. A test that
# interrupts a child would then wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules with a slow fixture. A single worker process runs all tests in such a module (tests/workers.py), so
# the fixture is made only once.
TOGETHER = {
    "tests/test_debugging.py",
    "tests/benchmarks/test_throughput.py",
    "tests/cli/test_cli_laptop.py",
    "tests/gguf/test_gguf_vocabularies.py",
    "tests/project/test_docs_run.py",
    "tests/project/test_limits_page.py",
    "tests/llama/test_smollm2_answers.py",
    "tests/server/test_server_command.py",
    "tests/spec_decode/test_draft_overlap.py",
}
CONTRACTS = "tests/models/test_contract_"
PARITY = "tests/parity/"  # All modules in this folder need transformers' answers.


def pytest_collection_modifyitems(items):
    """Mark the tests that one worker process runs together."""
    for item in items:
        module, _, name = item.nodeid.partition("::")
        if module in TOGETHER:
            item.together = module
        elif module.startswith(PARITY):
            item.together = PARITY
        elif module.startswith(CONTRACTS):  # Each class makes one checkpoint for all its tests.
            item.together = name.partition("::")[0]


def pytest_collection_finish(session):
    """Freeze imported and collected objects, so that the garbage collector skips them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # Hypothesis makes many short-lived objects.


@contextmanager
def _hidden(folder):
    """Hide the compiler and all compiled libraries inside the context."""
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
    """Return the compiled kernels. Tests run once for each instruction set of this CPU."""
    return opened(request.param)


@pytest.fixture(scope="session")
def kernel_device():
    """Return the device for Triton kernels: a GPU, or the CPU with Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed; `make test` fetches it into build/gpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    interpreter.accelerate()
    return torch.device("cpu")


@pytest.fixture
def dots_in_order(kernel_device, monkeypatch):
    """Make the interpreter's `tl.dot` add an element's products one after another.

    The interpreter normally calls BLAS, where an element's rounding depends on its position in the tile. A
    GPU has no such dependence, and keeps its own `tl.dot`.
    """
    if kernel_device.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot_in_order)


def _dot_in_order(builder, a, b, d, *_):
    """Compute tl.dot in order. Zero rows and columns in `a` are skipped if `b` is finite."""
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
    """Return a function that installs a distribution "strange" 1.2 with one module, strange_module.

    `group`: the entry points' group. `code`: the module's source. `names`: entry point name -> attribute in
    the module.
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
