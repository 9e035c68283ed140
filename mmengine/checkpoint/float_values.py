"""Reads unquantised tensors, such as the scales of quantised matrices, as float32. Does not import torch."""

import numpy as np

from mmengine.checkpoint.files import read_range
from mmengine.checkpoint.tensors import TensorEntry, tensor_error

FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}


def read_floats(entry: TensorEntry) -> np.ndarray:
    """Return a tensor as float32. The stored dtype must be a key in FLOATS."""
    data = read_range(entry.path, entry.start, entry.num_bytes, f"tensor {entry.stored_name}")
    found = np.frombuffer(data, FLOATS[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32)


def read_scales(entry: TensorEntry) -> np.ndarray:
    """Return scales as float32. Raises ModelError for a scale that is not finite."""
    values = read_floats(entry)
    if not bool(np.isfinite(values).all()):
        raise tensor_error(entry, "holds a scale that is not finite; download it again")
    return values
