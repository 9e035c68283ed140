"""All factories of tiny checkpoints, by transformers' model type."""

from dataclasses import replace
from pathlib import Path

import torch

from tests.any_model import (
    factories_grid,
    factories_image,
    factories_more,
    factories_special,
    factories_text,
    factories_tiles,
    factories_video,
)
from tests.any_model.factories import write_factory

TEXT = factories_text.TEXT
NO_TORCHVISION = factories_image.FACTORIES  # Their processors run on Pillow.
TORCHVISION = {
    **factories_grid.FACTORIES,
    **factories_more.FACTORIES,
    **factories_tiles.FACTORIES,
    **factories_special.FACTORIES,
    **factories_video.FACTORIES,
}
IMAGE = {**NO_TORCHVISION, **TORCHVISION}
VIDEO = frozenset(  # Models whose processors take videos.
    {
        *("ernie4_5_vl_moe", "gemma4", "gemma4_shared", "glm46v", "glm4v", "glm_ocr", "internvl", "kimi_k25"),
        *("cohere_compass", "exaone4_5", "glm4v_moe", "hyperclovax_vision_v2", "muse_glimmer"),
        *("llava_onevision", "molmo2", "qwen2_5_vl", "qwen2_vl", *factories_video.FACTORIES),
    }
)


# Weight seeds for models that, with seed 0, repeat a few tokens or answer with an image's placeholder.
SEEDS = {"glm4": 5, "glm4v": 3, "glm46v": 3, "got_ocr2": 6, "hunyuan_vl": 8, "llava": 1}
SEEDS.update({"glm4v_moe": 1, "muse_glimmer": 2, "starcoder2": 4, "llava_next": 10, "llava_next_video": 1})


def write(name: str, folder: Path) -> torch.nn.Module:
    """Write the checkpoint for a model type, and return transformers' model in float32."""
    factory = TEXT[name] if name in TEXT else IMAGE[name]
    return write_factory(replace(factory, seed=SEEDS.get(name, 0)), folder)
