"""Some rows of a tensor, picked on the host."""

from collections.abc import Callable

import numpy as np
import torch

from mmengine.runtime.upload import upload


def take(tensor: torch.Tensor, picked: np.ndarray) -> torch.Tensor:
    """Rows `picked` (ascending indices) of `tensor`: itself when that is all of them, else a copy."""
    if len(picked) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(picked, tensor.device))


def on_rows(
    logits: torch.Tensor, picked: np.ndarray, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`logits`, changed in rows `picked` (ascending indices) alone."""
    if len(picked) == len(logits):
        return change(logits)
    index = upload(picked, logits.device)
    logits[index] = change(logits[index])
    return logits
