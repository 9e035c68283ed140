import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module():
    """A module of the benchmarks folder, by name."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")
