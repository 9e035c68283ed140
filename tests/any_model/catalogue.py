"""All factories of tiny checkpoints, by transformers' model type."""

from pathlib import Path

import torch

from tests.any_model import (
    factories_grid,
    factories_image,
    factories_special,
    factories_text,
    factories_tiles,
)
from tests.any_model.factories import write_factory

TEXT = factories_text.TEXT
NO_TORCHVISION = factories_image.FACTORIES  # Their processors run on Pillow.
IMAGE = {
    **NO_TORCHVISION,
    **factories_grid.FACTORIES,
    **factories_tiles.FACTORIES,
    **factories_special.FACTORIES,
}


def write(name: str, folder: Path) -> torch.nn.Module:
    """Write the checkpoint for a model type, and return transformers' model in float32."""
    return write_factory(TEXT[name] if name in TEXT else IMAGE[name], folder)
