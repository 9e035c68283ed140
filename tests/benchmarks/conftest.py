import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """A module of the benchmarks folder, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
