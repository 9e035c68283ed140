"""The dtypes that an engine can compute in, keyed by name."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def name_of(dtype: torch.dtype) -> str:
    """Return the name for a dtype in DTYPES, such as "float32"."""
    return str(dtype).removeprefix("torch.")
