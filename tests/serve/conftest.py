"""Models for tests of the whole engine."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="session")
def random_weights(tmp_path_factory):
    """Return a checkpoint with the included checkpoint's shape and random weights. Unlike the included
    checkpoint, it writes JSON only if a grammar enforces JSON.
    """
    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(pytest.importorskip("mmengine_shapes").checkpoint_path(), folder)
    generator = torch.Generator().manual_seed(7)
    path = folder / "model.safetensors"
    weights = {
        name: one if "norm" in name else 0.05 * torch.randn(one.shape, generator=generator).to(one.dtype)
        for name, one in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder
