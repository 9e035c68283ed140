"""The reference attention backend for CPU and CUDA. It gathers a row group's KV and calls torch's SDPA.

Decode rows form one group, which is padded to its longest row and masked by length. If the padding exceeds
MAX_PADDING times the rows' own KV, the rows are split into groups with similar lengths. Prefill rows are
grouped by equal query length and KV length, without padding. The workspace for gathered KV is as large as a
step's largest group.

Not yet run on CUDA. On CUDA, all prefill chunks after the first need a mask, and SDPA has no fast kernel for
masks with grouped heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.pool import FP8, KVPool

Places = slice | torch.Tensor
MAX_PADDING = 0.5  # maximum ratio between a decode group's padding blocks and the rows' own blocks


@dataclass(frozen=True, slots=True)
class Group:
    """Describes g rows with equal query lengths. One SDPA call computes their attention.

    `tokens`: indices of the rows' g * query_len tokens in the step. `pages`: int64 [2 * g * b], for b blocks
    per row: all rows' K pages, then all rows' V pages. `mask`: values 0 or -inf, [g, 1, 1, kv_len] for
    decode, [query_len, kv_len] for prefill. No mask is needed if all decode rows have kv_len tokens, or if a
    prefill begins at token 0.
    """

    tokens: Places
    num_rows: int
    query_len: int
    kv_len: int
    pages: torch.Tensor
    mask: torch.Tensor | None


class TorchPagedAttention:
    """Implements AttentionBackend."""

    reads_unwritten = True
    captures = False

    def __init__(self, spec: ModelSpec, kv: KVPool) -> None:
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._block_size = kv.block_size
        self._device, self._dtype, self._is_fp8 = kv.blocks.device, kv.dtype, kv.is_fp8
        self._pool = kv
        self._page_values = kv.block_size * self._kv_heads * self._head_dim
        # Page 2 * block contains the block's K, and the next page contains its V.
        self._pages = [layer.view(-1, self._page_values) for layer in kv.blocks.unbind(0)]
        self._workspace = torch.empty(0, dtype=kv.blocks.dtype, device=self._device)
        self._groups: list[Group] = []
        self._slots = self._k_places = self._v_places = torch.empty(0, dtype=torch.int64)

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        slots, table, lens = meta.on_device(self._device)
        # A group reads equally many blocks for each row. Another request's block may contain NaN. Beyond a
        # row's length, the group therefore reads the dummy block, which contains zeros.
        blocks = torch.arange(table.shape[1], device=self._device) * self._block_size
        table *= blocks < lens[:, None]
        self._set_slots(slots)
        starts = np.cumsum(meta.query_lens) - meta.query_lens
        decode = meta.query_lens == 1
        self._groups = []
        if decode.any():
            parts = self._cut_by_length(np.flatnonzero(decode), meta.kv_lens)
            self._groups.extend(self._decode_group(meta, part, starts, table, lens) for part in parts)
        if not decode.all():
            self._groups.extend(self._prefill_groups(meta, np.flatnonzero(~decode), starts, table))
        self._reserve(self._groups)

    def _set_slots(self, slots: Tensor) -> None:
        """Compute where the pool stores the step's tokens. `slots`: int64 [t], on the device."""
        # In the pool each block's V follows its K. So the K of slot s = block * block_size + offset is stored
        # at s + block * block_size. The block size is a power of 2, so block * block_size is s & -block_size.
        self._slots, self._k_places = slots, slots + (slots & -self._block_size)
        self._v_places = self._k_places + self._block_size

    def _reserve(self, groups: Sequence[Group]) -> None:
        """Make the workspace large enough for each of `groups`."""
        need = max(group.pages.numel() for group in groups) * self._page_values
        if self._workspace.numel() < need:
            self._workspace = self._workspace.new_empty(need)

    def cache_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See AttentionPort. Returns None for an fp8 pool, which stores converted K and V."""
        return None if self._is_fp8 else (self._pool.layers[layer], self._slots)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._pool.store(layer, k, v, self._k_places, self._v_places)

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if len(self._groups) == 1 and self._groups[0].num_rows * self._groups[0].query_len == q.shape[0]:
            return self._attend(layer, self._groups[0], q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            out[group.tokens] = self._attend(layer, group, q[group.tokens])
        return out

    def _attend(self, layer: int, group: Group, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output for q [g * query_len, num_heads, head_dim], in the same shape."""
        k, v = self._gather(layer, group).unbind(0)
        if group.query_len == 1:
            # The query heads of a KV head become queries of one head, so KV is not repeated.
            q = q.reshape(group.num_rows, self._kv_heads, -1, self._head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            return out.reshape(-1, self._heads, self._head_dim)
        q = q.reshape(group.num_rows, group.query_len, self._heads, self._head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(-1, self._heads, self._head_dim)

    def _gather(self, layer: int, group: Group) -> torch.Tensor:
        """Return the group's K and V, [2, g, num_kv_heads, kv_len, head_dim].

        The result is a view of the workspace, valid until the next call. For an fp8 pool the result is a
        copy.
        """
        pages = group.pages
        gathered = self._workspace[: pages.numel() * self._page_values].view(-1, self._page_values)
        torch.index_select(self._pages[layer], 0, pages, out=gathered)
        gathered = gathered.view(2, group.num_rows, -1, self._kv_heads, self._head_dim)
        if self._is_fp8:
            gathered = gathered.view(FP8).to(self._dtype)
        return gathered[:, :, : group.kv_len].transpose(2, 3)

    def _cut_by_length(self, rows: np.ndarray, kv_lens: np.ndarray) -> list[np.ndarray]:
        """Return `rows` split into groups, or as one group if it needs little padding. Within a split group,
        block counts differ by less than a factor of two.
        """
        blocks = -(-kv_lens[rows] // self._block_size)
        if int(blocks.max()) * len(rows) <= (1 + MAX_PADDING) * int(blocks.sum()):
            return [rows]
        powers = np.frexp(blocks)[1]
        return [rows[powers == power] for power in np.unique(powers)]

    def _decode_group(
        self, meta: AttentionMeta, rows: np.ndarray, starts: np.ndarray, table: Tensor, kv_lens_device: Tensor
    ) -> Group:
        kv_lens = meta.kv_lens[rows]
        kv_len = int(kv_lens.max())
        places = token_places(rows, self._device)
        mask = None
        if (kv_lens != kv_len).any():
            beyond = torch.arange(kv_len, device=self._device) >= kv_lens_device[places][:, None]
            mask = torch.zeros(beyond.shape, dtype=self._dtype, device=self._device)
            mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        pages = self._page_index(table[places], kv_len)
        return Group(token_places(starts[rows], self._device), len(rows), 1, kv_len, pages, mask)

    def _prefill_groups(
        self, meta: AttentionMeta, rows: np.ndarray, starts: np.ndarray, table: Tensor
    ) -> list[Group]:
        shapes: dict[tuple[int, int], list[int]] = {}
        for row in rows.tolist():
            shapes.setdefault((int(meta.query_lens[row]), int(meta.kv_lens[row])), []).append(row)
        groups = []
        for (query_len, kv_len), members in shapes.items():
            tokens = (starts[members][:, None] + np.arange(query_len)).reshape(-1)
            tables = table[token_places(np.array(members), self._device)]
            groups.append(
                Group(
                    token_places(tokens, self._device),
                    len(members),
                    query_len,
                    kv_len,
                    self._page_index(tables, kv_len),
                    None if query_len == kv_len else self._causal_mask(query_len, kv_len),
                )
            )
        return groups

    def _page_index(self, table: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Return `Group.pages` for a block table, int64 [g, b]. Only blocks for kv_len tokens are
        included.
        """
        k_pages = table[:, : -(-kv_len // self._block_size)] * 2
        return torch.stack((k_pages, k_pages + 1)).view(-1)

    def _causal_mask(self, query_len: int, kv_len: int) -> torch.Tensor:
        """Return the causal mask for the row's last query_len tokens."""
        mask = torch.full((query_len, kv_len), float("-inf"), dtype=self._dtype, device=self._device)
        return mask.triu_(kv_len - query_len + 1)


def token_places(indices: np.ndarray, device: torch.device) -> Places:
    """Return a slice if the ascending indices are adjacent, else an index tensor. A slice avoids a copy."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return upload(indices.astype(np.int64), device)
