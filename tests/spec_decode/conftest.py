import pytest

from mmengine.native import library as native_library
from tests.serve.conftest import random_weights

__all__ = ["random_weights"]


@pytest.fixture(params=["kernels", "torch"])
def compute(request, monkeypatch):
    """Run a draft head with the native kernels, or with torch."""
    if request.param == "torch":
        monkeypatch.setattr(native_library, "load", lambda: None)
    elif native_library.load() is None:
        pytest.skip(native_library.describe())
    return request.param
