"""Dtypes that an engine computes in, by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """Of one of DTYPES."""
    return str(dtype).removeprefix("torch.")
