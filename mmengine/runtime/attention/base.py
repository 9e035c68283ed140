"""What an attention backend is given once a step, and what it must do."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.kv import KVPool


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Lengths and places of one step: n rows, t tokens, rows one after the other.

    Lengths are kept on the host as well, because how work is cut depends on them and reading them
    back from a device would wait for it.
    """

    query_lens: np.ndarray  # int32 [n], host: tokens of each row in this step, at least 1
    kv_lens: np.ndarray  # int32 [n], host: tokens of each row after this step
    slot_mapping: torch.Tensor  # int64 [t]: block * block_size + offset
    block_table: torch.Tensor  # int64 [n, b], padded with block 0
    kv_lens_device: torch.Tensor  # int64 [n]


class AttentionBackend(Protocol):
    """Paged attention over a KVPool. Implements models.plugin.AttentionPort, after `begin`.

    Scores are scaled by head_dim ** -0.5. A row's queries are its last `query_lens` tokens and see
    every earlier token of the row and themselves. All rows of a layer are appended before any is
    attended, so a row may read blocks that another row fills in the same step.
    """

    def __init__(self, spec: ModelSpec, kv: KVPool) -> None: ...

    def begin(self, meta: AttentionMeta) -> None:
        """Prepare a step; everything that is the same for all layers is built here."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], at the step's slots."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend q [t, num_heads, head_dim]; same shape back."""
