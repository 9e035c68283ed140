"""Adds LoRA adapters' products to linear layers in torch, on GPUs and on CPUs without compiled kernels. Not
yet run on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmengine.native.lora import LoraPart

Linear = Callable[[Tensor], Tensor]


class AddedRows(NamedTuple):
    """Products to add to a linear layer's output, for the tokens with the indices `rows` in a step."""

    rows: Tensor  # int64 [n]
    parts: tuple[LoraPart, ...]


def add_parts(x: Tensor, y: Tensor, parts: Sequence[LoraPart]) -> None:
    """Add scale * x Aᵀ Bᵀ for each part to y [m, n] in place. `x`: [m, k]."""
    for a, b, offset, scale in parts:
        y[:, offset : offset + len(b)] += (x @ a.t() @ b.t()) * scale


def with_rows(linear: Linear, added: Sequence[AddedRows]) -> Linear:
    """Return a linear layer that runs `linear` and adds the products in `added` to their rows."""
    if not added:
        return linear

    def run(x: Tensor) -> Tensor:
        y = linear(x)
        for rows, parts in added:
            own = y.index_select(0, rows)
            add_parts(x.index_select(0, rows), own, parts)
            y.index_copy_(0, rows, own)
        return y

    return run


def rows_on(rows: object, device: torch.device) -> Tensor:
    """Return numpy row indices, int32 [n], as an int64 tensor on `device`."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device)
