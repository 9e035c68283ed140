"""The dtypes in which an engine can compute, by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in DTYPES, such as "float32"."""
    return str(dtype).removeprefix("torch.")
