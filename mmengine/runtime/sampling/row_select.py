"""Some rows of a tensor, selected on the host."""

from collections.abc import Callable

import numpy as np
import torch

from mmengine.runtime.device.upload import upload


def take(tensor: torch.Tensor, selected: np.ndarray) -> torch.Tensor:
    """Rows `selected` (ascending indices) of `tensor`: itself when that is all of them, else a copy."""
    if len(selected) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(selected, tensor.device))


def on_rows(
    logits: torch.Tensor, selected: np.ndarray, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`logits`, changed in rows `selected` (ascending indices) alone."""
    if len(selected) == len(logits):
        return change(logits)
    index = upload(selected, logits.device)
    logits[index] = change(logits[index])
    return logits
