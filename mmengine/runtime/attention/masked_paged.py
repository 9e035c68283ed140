"""Paged attention in torch for layers with special features (see LayerAttention): a window, chunks, soft
caps, sinks, a scale, or runs of tokens with bidirectional attention.

For each combination of window, chunk and runs, a step groups the rows by length, as torch_paged.py does. Only
blocks with a visible key are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mmengine.models.spec import LayerAttention, ModelSpec
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.torch_paged import Group, TorchPagedAttention, token_places
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.pool import KVPool

MAX_SCORES = 2**24  # maximum number of scores in memory at once, for layers with soft caps or sinks


class Kind(NamedTuple):
    """The features that determine the visible keys for a query."""

    window: int
    chunk: int
    sees_runs: bool

    def first_keys(self, positions: np.ndarray) -> np.ndarray:
        """Return the first visible key for each query at `positions`, int64, in the shape of `positions`."""
        first = np.zeros(positions.shape, np.int64)
        if self.window:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


class MaskedPagedAttention(TorchPagedAttention):
    """Implements AttentionBackend. `layers`: one entry for each attention layer. Scores are computed as in
    transformers' eager attention, with the softmax in float32.
    """

    def __init__(self, spec: ModelSpec, kv: KVPool, layers: Sequence[LayerAttention]) -> None:
        super().__init__(spec, kv)
        self._layers, self._kv_places = tuple(layers), spec.kv_places
        self._kinds = [Kind(layer.window, layer.chunk, layer.sees_runs) for layer in layers]
        self._by_kind: dict[Kind, list[Group]] = {}
        self._meta: AttentionMeta | None = None

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        self._set_slots(upload(np.ascontiguousarray(meta.slots, np.int64), self._device))
        self._meta, self._by_kind = meta, {}

    def run(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention output for q [t, num_heads, head_dim]. `sinks`: a score for each head
        [num_heads].
        """
        kind, place = self._kinds[layer], self._kv_places[layer]
        groups = self._by_kind.get(kind)
        if groups is None:
            groups = self._by_kind[kind] = self._group(kind)
            self._reserve(groups)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in groups:
            k, v = self._gather(place, group).unbind(0)
            rows = q[group.tokens].view(group.num_rows, group.query_len, self._heads, self._head_dim)
            found = self._attend_masked(self._layers[layer], group, rows.transpose(1, 2), k, v, sinks)
            out[group.tokens] = found.transpose(1, 2).reshape(-1, self._heads, self._head_dim)
        return out

    def _attend_masked(
        self,
        layer: LayerAttention,
        group: Group,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output for q [g, heads, s, d] over k and v [g, kv_heads, n, d], as [g, heads, s, d]."""
        scale = layer.scale or self._head_dim**-0.5
        if not layer.softcap and sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, scale=scale, enable_gqa=self._heads != self._kv_heads
            )
        queries = max(1, MAX_SCORES // (len(q) * self._heads * group.kv_len))
        parts = []
        for start in range(0, group.query_len, queries):
            rows = slice(start, start + queries)
            mask = group.mask[:, :, rows] if group.mask is not None and group.query_len > 1 else group.mask
            parts.append(_weighted(q[:, :, rows], k, v, scale, layer.softcap, mask, sinks))
        return torch.cat(parts, 2)

    def _group(self, kind: Kind) -> list[Group]:
        meta = self._meta
        assert meta is not None
        starts = np.cumsum(meta.query_lens) - meta.query_lens
        decode = meta.query_lens == 1
        groups = []
        if decode.any():
            rows = np.flatnonzero(decode)
            firsts = kind.first_keys(meta.kv_lens[rows].astype(np.int64) - 1)
            lengths = meta.kv_lens[rows] - firsts // self._block_size * self._block_size
            for part in self._cut_by_length(np.arange(len(rows)), lengths):
                groups.append(self._decode(rows[part], firsts[part], starts))
        runs = meta.run_ids if kind.sees_runs else None
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for row in np.flatnonzero(~decode).tolist():
            count, first = int(meta.query_lens[row]), int(starts[row])
            has_runs = runs is not None and bool((runs[first : first + count] >= 0).any())
            shapes.setdefault((count, int(meta.kv_lens[row]), row if has_runs else -1), []).append(row)
        for (count, _, own), members in shapes.items():
            ids = runs[starts[own] : starts[own] + count] if runs is not None and own >= 0 else None
            groups.append(self._prefill(kind, np.array(members), starts, ids))
        return groups

    def _decode(self, rows: np.ndarray, firsts: np.ndarray, starts: np.ndarray) -> Group:
        """Return the group for rows with one query each. `firsts`: each query's first visible key."""
        meta = self._meta
        assert meta is not None
        lens, first_block = meta.kv_lens[rows].astype(np.int64), firsts // self._block_size
        num_blocks = -(-lens // self._block_size) - first_block
        pages, keys = self._pages_of(rows, first_block, num_blocks)
        visible = (keys >= firsts[:, None]) & (keys < lens[:, None])
        mask = None if visible.all() else self._mask(visible)[:, None, None]
        return Group(token_places(starts[rows], self._device), len(rows), 1, keys.shape[1], pages, mask)

    def _prefill(self, kind: Kind, rows: np.ndarray, starts: np.ndarray, run_ids: np.ndarray | None) -> Group:
        """Return a group for rows that have equal query lengths and KV lengths. `run_ids`: each query's run,
        int32 [query_len], if the group is a single row with runs; otherwise None.
        """
        meta = self._meta
        assert meta is not None
        count, length = int(meta.query_lens[rows[0]]), int(meta.kv_lens[rows[0]])
        queries = np.arange(length - count, length)
        firsts = kind.first_keys(queries)
        first_block = np.full(len(rows), firsts[0] // self._block_size)
        pages, keys = self._pages_of(rows, first_block, -(-length // self._block_size) - first_block)
        keys = keys[0]
        visible = keys <= queries[:, None]
        if run_ids is not None:
            ids = np.full(len(keys), -1, np.int32)
            own = keys - queries[0]
            inside = (own >= 0) & (own < count)
            ids[inside] = run_ids[own[inside]]
            visible |= (run_ids[:, None] >= 0) & (run_ids[:, None] == ids)
        visible &= keys >= firsts[:, None]
        tokens = (starts[rows][:, None] + np.arange(count)).reshape(-1)
        mask = self._mask(visible)[None, None]
        return Group(token_places(tokens, self._device), len(rows), count, len(keys), pages, mask)

    def _pages_of(
        self, rows: np.ndarray, first_block: np.ndarray, num_blocks: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Return the group's pages (Group.pages), and each key's position in its row, int64 [g, n].

        `num_blocks`: how many blocks each row reads, beginning with `first_block`. A row that reads fewer
        blocks than the longest row is padded with the dummy block.
        """
        meta = self._meta
        assert meta is not None
        numbers = first_block[:, None] + np.arange(int(num_blocks.max()))
        inside = numbers < (first_block + num_blocks)[:, None]
        blocks = meta.table[rows[:, None], np.minimum(numbers, meta.table.shape[1] - 1)] * inside
        pages = (2 * blocks.astype(np.int64)).reshape(-1)
        keys = (numbers[:, :, None] * self._block_size + np.arange(self._block_size)).reshape(len(rows), -1)
        return upload(np.concatenate((pages, pages + 1)), self._device), keys

    def _mask(self, visible: np.ndarray) -> torch.Tensor:
        """Return a mask to add to the scores: 0 where `visible`, otherwise -inf."""
        hidden = upload(~visible, self._device)
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))


def _weighted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention output [g, heads, s, d], computed from explicit scores."""
    num_rows, heads, queries, width = q.shape
    grouped = q.reshape(num_rows, k.shape[1], -1, width)  # joins the queries of heads with the same KV head
    scores = (grouped @ k.transpose(2, 3) * scale).view(num_rows, heads, queries, -1)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(num_rows, -1, queries, 1)
        weights = torch.cat((scores, extra), -1).softmax(-1, dtype=torch.float32)[..., :-1]
    weights = weights.to(q.dtype).view(num_rows, k.shape[1], -1, scores.shape[-1])
    return (weights @ v).view(num_rows, heads, queries, -1)
