"""The interface for attention backends, and each step's attention metadata."""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from mmengine.core.executor import WindowPlan
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.pool import KVPool


class AttentionMeta(msgspec.Struct, frozen=True, eq=False):
    """The lengths, slots and block tables for a step with n rows (requests) and t tokens, on the host.

    A row's tokens are adjacent. CPU kernels read these arrays in place; other backends copy them to the
    device.
    """

    query_lens: np.ndarray  # int32 [n], number of each row's tokens in this step, at least 1
    kv_lens: np.ndarray  # int32 [n], number of each row's tokens after this step
    slots: np.ndarray  # int64 [t], each token's KV slot: block * block_size + offset
    # int32 [n, b], each row's block ids. The row stride may exceed b. After a row's last block, the ids are
    # arbitrary but valid.
    table: np.ndarray
    # int32 [n], number of drafts at the end of each row; None: no drafts
    num_drafts: np.ndarray | None = None
    # int32 [t], the index of each token's bidirectional run (ModelSpec.runs) in its row, or -1. None: no runs
    run_ids: np.ndarray | None = None
    # Slots and tables for the sliding-window block groups; `slots` and `table` are for the first group.
    windows: tuple[WindowPlan, ...] = ()

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy slots [t], table [n, b] and kv_lens [n] to `device` as int64 tensors, in a single transfer."""
        num_rows, num_tokens, places = len(self.kv_lens), len(self.slots), self.table.size
        packed = np.empty(num_tokens + places + num_rows, dtype=np.int64)
        packed[:num_tokens] = self.slots
        packed[num_tokens : num_tokens + places].reshape(self.table.shape)[:] = self.table
        packed[num_tokens + places :] = self.kv_lens
        slots, table, kv_lens = upload(packed, device).split((num_tokens, places, num_rows))
        return slots, table.view(self.table.shape), kv_lens


class Bucket(NamedTuple):
    """The size of a captured step: `num_rows` rows with `query_len` tokens each."""

    num_rows: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.query_len


def too_old(capability: tuple[int, int], needed: tuple[int, int]) -> str | None:
    """Return an error text if the GPU's compute capability is lower than `needed`, otherwise None."""
    if capability >= needed:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, needed))
    return f"this GPU has compute capability {have}, and {need} is needed"


class AttentionBackend(Protocol):
    """Paged attention over a KVPool. Also implements models.plugin.AttentionPort after `begin`.

    Scores are scaled by head_dim ** -0.5. A row's queries are its last `query_lens` tokens. Each query
    attends to its own token and to all earlier tokens in the row. Each layer calls `append` for all rows
    before `run`, so that a row can read blocks that another row fills in the same step.
    """

    reads_unwritten: bool
    """Whether `run` reads KV after a row's last token, with weight 0. If so, blocks are zeroed before
    their first use, because 0 times an old NaN is NaN.
    """

    captures: bool
    """Whether `append` and `run` can be captured in a CUDA graph after `begin(meta, bucket)`. The graph is
    replayed after another `begin` with the same bucket, which writes the step's data to buffers with fixed
    addresses.
    """

    def __init__(self, spec: ModelSpec, kv: KVPool) -> None: ...

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        """Compute the data that all layers of a step share.

        `bucket`: the step's size if the step is captured or replayed.
        """

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], in the step's slots."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output for the queries q [t, num_heads, head_dim], in the same shape."""
