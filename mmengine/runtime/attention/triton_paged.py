"""Paged attention on a GPU by Triton kernels. Not yet run on a GPU.

These kernels are used for float32, for head sizes that FlashInfer does not support, and if no CUDA compiler
is installed. In each step the host assigns tiles (queries) and spans of keys to the kernels' programs
(gpu/attention_tiles.py). Kernels in a CUDA graph read this assignment from a buffer. For each captured size,
the buffer's layout and the number of programs are fixed.
"""

from dataclasses import replace
from math import prod
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from mmengine.errors import ConfigError, in_one_line
from mmengine.gpu.attention_tiles import SPAN, TILE_ROWS, Work, cut, num_tiles, tile_rows
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.pages import row_pages, whole_step
from mmengine.runtime.attention.torch_paged import TorchPagedAttention
from mmengine.runtime.attention.triton_capability import load, unfit
from mmengine.runtime.device.port import Device
from mmengine.runtime.device.upload import upload, upload_into
from mmengine.runtime.kv.pool import KVPool, fp8_bytes, kv_places

PARTS_BYTES = 64 * 2**20  # workspace for partial results of tiles that several programs compute
MAX_PARTS = 4096  # maximum number of partial results in a step
PROGRAMS_PER_PROCESSOR = 4


def _aligned(size: int) -> int:
    """Round a size in int32 units up to a multiple of 16 bytes, the kernels' alignment."""
    return -(-size // 4) * 4


class Layout(NamedTuple):
    """The capacities of the adjacent lists in a step's int32 buffer. The last list, `pages`, takes the
    remaining buffer.
    """

    num_rows: int
    num_tokens: int
    num_tiles: int
    num_joins: int

    def places(self) -> list[slice]:
        """Return a buffer slice for each list: first the slots and the pool indices for K and V (int64
        [3, t]), then the lists of a Work.
        """
        rows = self.num_rows
        sizes = (6 * self.num_tokens, 2, 4 * self.num_tiles, 4 * self.num_joins, rows + 1, rows, rows, rows)
        found, start = [], 0
        for size in sizes:
            found.append(slice(start, start + size))
            start += _aligned(size)
        return [*found, slice(start, None)]


class TritonPagedAttention:
    """Implements AttentionBackend. A row's result depends only on its own queries, keys and values, and on
    the largest number of queries that a row in the step has.

    With `one_tile`, a token's result has the same bits if the token is computed alone, within a prompt chunk,
    or next to drafts. An fp8 pool contains K and V rounded to fp8 without scaling.
    """

    reads_unwritten = False
    captures = True

    def __init__(
        self, spec: ModelSpec, kv: KVPool, kernels: ModuleType | None = None, *, one_tile: bool = False
    ) -> None:
        """Build the backend. `kernels`: replaces mmengine.gpu.attention_kernels in tests.

        Raises ConfigError if the kernels cannot be used, or if their results differ from torch's.
        """
        self._spec, self._one_tile = spec, one_tile
        self._kv, self._block_size, self._device = kv, kv.block_size, kv.blocks.device
        self._blocks = kv.blocks.unbind(0)
        self._parts = torch.empty(PARTS_BYTES // 4, dtype=torch.float32, device=self._device)
        self._programs = _programs(kv.device, spec.num_kv_heads)
        self._buffer = torch.empty(0, dtype=torch.int32, device=self._device)  # for captured steps
        self._captured: dict[Bucket, tuple[torch.Tensor, Work]] = {}
        # The slots and the pool indices for K and V, int64 [3, t]. Set by `begin`.
        self._step: tuple[torch.Tensor, Work]
        self._kernels = kernels or _compiled_kernels(spec, kv, one_tile)

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        longest = int(meta.query_lens.max()) if bucket is None else bucket.query_len
        rows = tile_rows(self._group, None if self._one_tile else longest)
        queries = rows // self._group
        width = self._group * min(queries, longest)
        lengths, befores = meta.kv_lens, meta.kv_lens - meta.query_lens
        if bucket is not None:
            # Tokens in the dummy block are padding, and no real token may attend to them.
            lengths = lengths - (meta.slots < self._block_size).reshape(bucket).sum(1)
        tiles, joins = cut(meta.query_lens, befores, lengths, queries, self._programs, self._max_parts(width))
        lists = whole_step(meta, self._block_size)
        columns = (tiles, joins, lists.query_starts, befores, lengths, lists.page_starts[:-1], lists.pages)
        if bucket is None:
            layout = Layout(len(lengths), len(meta.slots), len(tiles), len(joins))
            packed = self._pack(meta.slots, columns, layout)
            self._step = self._views(upload(packed, self._device), layout, rows, width)
            return
        layout = self._layout(bucket, queries, width)
        target = self._buffer_for(bucket, layout)
        upload_into(self._pack(meta.slots, columns, layout), target)
        if bucket not in self._captured:
            self._captured[bucket] = self._views(target, layout, rows, width)
        self._step = self._captured[bucket]

    def cache_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See AttentionPort. Returns None for an fp8 pool, because K and V must be converted before they are
        stored.
        """
        return None if self._kv.is_fp8 else (self._kv.layers[layer], self._step[0][0])

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._kv.store(layer, k, v, *self._step[0][1:])

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        return self._kernels.attend(q, self._blocks[layer], self._step[1])

    @property
    def _group(self) -> int:
        return self._spec.num_heads // self._spec.num_kv_heads

    def _max_parts(self, width: int) -> int:
        values = self._spec.num_kv_heads * width * (self._spec.head_dim + 2)
        return min(MAX_PARTS, (self._parts.numel() - 4) // values)

    def _layout(self, bucket: Bucket, queries: int, width: int) -> Layout:
        """Return a layout that is large enough for all results of `cut` for this bucket."""
        tiles = bucket.num_rows * int(num_tiles(np.array(bucket.query_len), queries))
        if tiles >= self._programs:
            return Layout(bucket.num_rows, bucket.num_tokens, tiles, 0)
        return Layout(bucket.num_rows, bucket.num_tokens, tiles + self._max_parts(width), tiles)

    def _buffer_for(self, bucket: Bucket, layout: Layout) -> torch.Tensor:
        """Return the buffer, which all buckets share, because only one bucket runs at a time.

        The first call allocates the buffer, so the largest bucket must be captured first.
        """
        if not self._buffer.numel():
            room = layout._replace(num_tiles=layout.num_tiles + MAX_PARTS, num_joins=layout.num_tiles)
            pages = bucket.num_rows * row_pages(self._spec, self._block_size, self._kv.num_blocks)
            self._buffer = self._buffer.new_zeros(room.places()[-1].start + pages)
        return self._buffer

    def _pack(self, slots: np.ndarray, columns: tuple[np.ndarray, ...], layout: Layout) -> np.ndarray:
        """Write all lists into one int32 array, at the positions that `layout` defines."""
        tiles, joins, *_, pages = columns
        at, *places = layout.places()
        packed = np.zeros(places[-1].start + len(pages), np.int32)
        kv_places(slots, self._block_size, packed[at].view(np.int64).reshape(3, -1))
        packed[places[0]] = len(tiles), len(joins)
        for place, column in zip(places[1:], columns, strict=True):
            packed[place][: column.size] = column.reshape(-1)
        return packed

    def _views(self, there: torch.Tensor, layout: Layout, rows: int, width: int) -> tuple[torch.Tensor, Work]:
        """Return the slots and the pool indices for K and V (int64 [3, t]), and the Work. Both use views into
        `there`, which contains the packed lists on the device.
        """
        places, counts, tiles, joins, *others = (there[place] for place in layout.places())
        shape = (self._max_parts(width), self._spec.num_kv_heads, width)
        num = prod(shape)
        totals = self._parts[: num * self._spec.head_dim].view(*shape, -1)
        sums = self._parts[_aligned(totals.numel()) :][: 2 * num].view(2, *shape)
        programs = min(self._programs, layout.num_tiles)
        joined = joins if layout.num_joins else None
        work = Work(rows, width, programs, totals, sums, counts, tiles, joined, *others)
        return places.view(torch.int64).view(3, -1), work


def _programs(device: Device, num_kv_heads: int) -> int:
    """Return the number of programs for each KV head. On a CPU this is only 4, because Triton's interpreter
    runs programs one after another.
    """
    processors = device.num_processors()
    if not processors:
        return 4
    return max(1, processors * PROGRAMS_PER_PROCESSOR // num_kv_heads)


def _compiled_kernels(spec: ModelSpec, kv: KVPool, one_tile: bool) -> ModuleType:
    """Compile the kernels, run them once for each tile size, and compare their results with torch.

    A missing compiler is thus reported at startup instead of in the first step. Raises ConfigError if the
    kernels cannot be used or their results differ.
    """
    problem = unfit(spec, kv)
    if problem:
        raise ConfigError(f"attention 'triton' cannot be used: {problem}; choose 'torch' or 'auto'")
    kernels = load()
    try:
        gap = max(_gap(spec, kv, kernels, one_tile, rows) for rows in TILE_ROWS)
    except Exception as error:  # compilers, loaders and drivers raise exceptions of any type
        raise ConfigError(
            f"the Triton attention kernels cannot be compiled or run on this machine "
            f"({in_one_line(error)}); choose attention 'torch'"
        ) from error
    bound = max(8 * torch.finfo(kv.dtype).eps, 1e-4)  # the kernels sum in a different order
    if not gap <= bound:
        raise ConfigError(
            f"the Triton attention kernels differ from torch by {gap:.1e} on this machine, more than "
            f"{bound:.1e}; choose attention 'torch', and please report it"
        )
    return kernels


def _gap(spec: ModelSpec, kv: KVPool, kernels: ModuleType, one_tile: bool, rows: int) -> float:
    """Return the largest difference between the kernels' and torch's results for a small example.

    The example has its own pool and two rows. In the first row, the queries fill a tile with `rows` rows, and
    the keys fill two spans. The second row has three tokens.
    """
    size, device = kv.block_size, kv.device.torch_device
    counts = np.array([max(1, rows * spec.num_kv_heads // spec.num_heads), 1], np.int32)
    lengths = np.array([SPAN + 9 + counts[0], 3], np.int32)
    width = -(-int(lengths[0]) // size)
    table = np.stack((np.arange(width, 0, -1), np.full(width, width + 1))).astype(np.int32)
    behind = [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    slots = [row[at // size].astype(np.int64) * size + at % size for row, at in zip(table, behind)]
    meta = AttentionMeta(counts, lengths, np.concatenate(slots), table)
    spec = replace(spec, num_layers=1)
    small = KVPool(spec, width + 2, size, kv.dtype, kv.device, is_fp8=kv.is_fp8)
    values = torch.arange(small.blocks.numel(), device=device).mul(0.7).sin().view(small.blocks.shape)
    values = values.to(kv.dtype)
    small.blocks.copy_(fp8_bytes(values) if kv.is_fp8 else values)
    shape = (int(counts.sum()), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    qkv = torch.arange(prod(shape), device=device).mul(1.3).cos().mul(2).to(kv.dtype).view(shape)
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
    ours = TritonPagedAttention(spec, small, kernels, one_tile=one_tile)
    found = []
    for backend in (ours, TorchPagedAttention(spec, small)):
        backend.begin(meta)
        backend.append(0, k, v)
        found.append(backend.run(0, q).float())
    gap = float((found[0] - found[1]).abs().max())
    return gap if gap == gap else float("inf")
