"""Compares a media item's tensors with transformers' inputs."""

import numpy as np
import torch

from mmengine_transformers.media.packing import unpack


def check_tensors(patches, inputs):
    """Check that each tensor in `patches` equals the input with the same name."""
    (item,) = unpack(patches)
    assert item.arrays.keys() <= inputs.keys()
    for entry in item.header.tensors:
        theirs = inputs[entry.name]
        if entry.dtype == "bfloat16":
            theirs = theirs.bfloat16().view(torch.uint16)
        assert np.array_equal(item.arrays[entry.name], theirs.numpy()), entry.name
