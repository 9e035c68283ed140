"""Dtypes that an engine can compute in, by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name; the dtype is in DTYPES."""
    return str(dtype).removeprefix("torch.")
