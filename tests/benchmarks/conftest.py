import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def module():
    """Return a function that imports a module of the benchmarks package, by its dotted name."""
    return lambda name: importlib.import_module(f"benchmarks.{name}")
