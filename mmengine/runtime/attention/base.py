"""What an attention backend is given once a step, and what it must do."""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.pool import KVPool


class AttentionMeta(msgspec.Struct, frozen=True, eq=False):
    """Lengths and places of one step, on the host: n rows, t tokens, rows one after the other.

    A kernel for CPUs reads these arrays where they lie; a backend that computes with tensors asks for
    copies on its device.
    """

    query_lens: np.ndarray  # int32 [n], tokens of each row in this step, at least 1
    kv_lens: np.ndarray  # int32 [n], tokens of each row after this step
    slots: np.ndarray  # int64 [t]: block * block_size + offset
    # int32 [n, b]. A view: rows may lie further apart than b. Of a row only the blocks that its kv_lens
    # tokens take may be read as its own; what stands behind them is some block of the pool.
    table: np.ndarray
    num_drafts: np.ndarray | None = None  # int32 [n], how many of a row's last tokens are drafts; None: none

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slots [t], table [n, b] and kv_lens [n]: int64 tensors on `device`, in one copy."""
        num_rows, num_tokens, places = len(self.kv_lens), len(self.slots), self.table.size
        packed = np.empty(num_tokens + places + num_rows, dtype=np.int64)
        packed[:num_tokens] = self.slots
        packed[num_tokens : num_tokens + places].reshape(self.table.shape)[:] = self.table
        packed[num_tokens + places :] = self.kv_lens
        slots, table, kv_lens = upload(packed, device).split((num_tokens, places, num_rows))
        return slots, table.view(self.table.shape), kv_lens


class Bucket(NamedTuple):
    """The size of a captured step: so many rows with so many tokens each."""

    num_rows: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len


def too_old(capability: tuple[int, int], needed: tuple[int, int]) -> str | None:
    """One sentence where a GPU has a smaller compute capability than `needed`."""
    if capability >= needed:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, needed))
    return f"this GPU has compute capability {have}, and {need} is needed"


class AttentionBackend(Protocol):
    """Paged attention over a KVPool. Implements models.plugin.AttentionPort, after `begin`.

    Scores are scaled by head_dim ** -0.5. A row's queries are its last `query_lens` tokens and see
    every earlier token of the row and themselves. All rows of a layer are appended before any is
    attended, so a row may read blocks that another row fills in the same step.
    """

    reads_unwritten: bool
    """Whether `run` multiplies what stands behind a row's last token, if only by 0: a block is then
    zeroed before it is first written, because of the NaN that an earlier request may have left there."""

    captures: bool
    """Whether `append` and `run` may be captured in a CUDA graph behind `begin(meta, bucket)`, and replayed
    behind any other one of that bucket: all that differs then lies in buffers that stay where they are."""

    def __init__(self, spec: ModelSpec, kv: KVPool) -> None: ...

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        """Prepare a step; everything that is the same for all layers is built here. `bucket`: the step has
        its size, and is captured or replayed."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], at the step's slots."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend q [t, num_heads, head_dim]; same shape back."""
