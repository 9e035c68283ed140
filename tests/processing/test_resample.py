"""Tests that `resize` and torch's `interpolate` give equal pixels."""

import numpy as np
import pytest
import torch

from mmengine.processing.media.resample import resize


@pytest.mark.parametrize("seed", range(80))
def test_equal_to_torch(seed):
    by = ("bicubic", "lanczos")[seed % 2]
    rng = np.random.default_rng(seed)
    height, width, new_height, new_width = rng.integers(1, 200, 4).tolist()
    planes = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
    if seed % 3 == 0:
        # Black and white pixels give the strongest overshoot.
        planes = (planes > 127).astype(np.uint8) * np.uint8(255)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(planes)[None], size=(new_height, new_width), mode=by, antialias=True
    )
    assert (resize(planes, new_height, new_width, by) == expected[0].numpy()).all()
