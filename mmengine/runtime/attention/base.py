"""The interface for attention backends, and the metadata that a backend gets in each step."""

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

    A row's tokens are adjacent. CPU kernels read these arrays in place. Other backends copy them to their
    device.
    """

    query_lens: np.ndarray  # int32 [n], number of each row's tokens in this step, at least 1
    kv_lens: np.ndarray  # int32 [n], number of each row's tokens after this step
    slots: np.ndarray  # int64 [t], where each token's KV is stored: block * block_size + offset
    # int32 [n, b], each row's block ids. The array is a view, so the row stride may exceed b. Entries after
    # the blocks for a row's kv_lens tokens name arbitrary blocks in the pool.
    table: np.ndarray
    # int32 [n], number of drafts at the end of each row's tokens; None: no drafts
    num_drafts: np.ndarray | None = None
    # int32 [t], the number of each token's run (ModelSpec.runs) within its row; -1: no run. None: no token
    # belongs to a run
    run_ids: np.ndarray | None = None
    # The slots and tables for block groups with a window. `slots` and `table` above are for the first group.
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
    """Return why a GPU is too old, if its compute capability is lower than `needed`, or else None."""
    if capability >= needed:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, needed))
    return f"this GPU has compute capability {have}, and {need} is needed"


class AttentionBackend(Protocol):
    """Paged attention over a KVPool. After `begin` a backend also implements models.plugin.AttentionPort.

    Scores are scaled by head_dim ** -0.5. A row's queries are its last `query_lens` tokens. Each query
    attends to its own token and to all earlier tokens in the row. In each layer `append` is called for all
    rows before `run`, so a row may read blocks that another row fills in the same step.
    """

    reads_unwritten: bool
    """Whether `run` reads KV after a row's last token, with weight 0. If so, blocks are zeroed before use,
    because 0 times an old NaN is NaN.
    """

    captures: bool
    """Whether `append` and `run` can be captured in a CUDA graph after `begin(meta, bucket)`. The graph is
    replayed after another `begin` with the same bucket, which writes the step's data to buffers with fixed
    addresses.
    """

    def __init__(self, spec: ModelSpec, kv: KVPool) -> None: ...

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        """Prepare a step: compute everything that its layers share.

        With `bucket` the step has the bucket's size, and is captured or replayed.
        """

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each [t, num_kv_heads, head_dim], in the step's slots."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output for the queries q [t, num_heads, head_dim], in the same shape."""
