"""Paged attention on a GPU with FlashInfer's fa2 kernels (version 0.7.2; not yet run on a GPU).

Before the layers run, `begin` plans the step on the host. Decoding rows and prompt rows have separate plans.
In a captured step, the kernels read their arguments from buffers with fixed addresses, so that the CUDA graph
can be replayed. All captured sizes share these buffers.
"""

from typing import Any

import numpy as np
import torch

from mmengine.errors import ConfigError, in_one_line
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.attention.flashinfer_capability import load, unfit
from mmengine.runtime.attention.flashinfer_host_plan import HostPlan
from mmengine.runtime.attention.pages import Part, row_pages, split, whole_step
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.pool import FP8, KVPool, kv_places

# NHD: [pages, 2, page_size, kv_heads, head_dim]. fa3 kernels are slower at decoding.
LAYOUT, KERNELS = "NHD", "fa2"
FLOAT_WORKSPACE_BYTES = 256 * 2**20  # workspace for rows whose KV is split among several thread blocks
# A captured step with at least this many KV heads (heads per row * rows) keeps a GPU busy. For example, an
# H100 has 132 multiprocessors, and each runs two thread blocks. Splitting a head's KV further would only
# reserve memory.
BUSY_HEADS = 512
TENSOR_CORE_GROUP = 4  # minimum number of query heads per KV head for which tensor cores speed up decoding


class FlashInferAttention:
    """Implements AttentionBackend. In an fp8 pool, K and V are rounded to fp8 with scale 1."""

    # The padding tokens in a captured step read unwritten slots at the end of a row's last block.
    reads_unwritten = True
    captures = True

    def __init__(self, spec: ModelSpec, kv: KVPool, library: Any = None) -> None:
        """Build the backend, compile missing kernels, and run the kernels once. Raises ConfigError if
        FlashInfer cannot be used. `library`: the FlashInfer package; tests pass a fake package.
        """
        if library is None:
            problem = unfit(spec, kv)
            if problem:
                raise ConfigError(
                    f"attention 'flashinfer' cannot be used: {problem}; choose 'torch' or 'auto'"
                )
            library = load()
        self._library, self._spec, self._device = library, spec, kv.blocks.device
        self._block_size = kv.block_size
        self._row_pages = row_pages(spec, kv.block_size, kv.num_blocks)
        self._dtype, self._is_fp8 = kv.dtype, kv.is_fp8
        self._pool = kv
        self._kv = [(layer[:, 0], layer[:, 1]) for layer in kv.layers]
        self._floats = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._host_plans = {
            True: HostPlan(kv.device),
            False: HostPlan(kv.device),
        }  # keyed by whether all rows in the part decode
        self._decode, self._prompt = self._make(True), self._make(False)
        self._captured: dict[Bucket, Any] = {}
        self._buffers: tuple[torch.Tensor, ...] = ()  # shared by all captured steps
        self._calls: list[tuple[slice | torch.Tensor, Any]] = []
        # int64 [3, t]: for each token, its slot and the indices of its K and V in the pool
        self._places = torch.empty(3, 0, dtype=torch.int64)
        self._compile_and_run()

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        if bucket is None:
            both = zip(split(meta, self._block_size), (True, False))
            parts = [(part, decodes) for part, decodes in both if part is not None]
        else:
            parts = [(whole_step(meta, self._block_size), bucket.query_len == 1)]
        places, *lists = self._upload(meta.slots, [part for part, _ in parts])
        if bucket is None:
            self._places = places
        else:
            self._places = self._buffers_for(bucket)[0][:, : bucket.num_tokens]
            self._places.copy_(places)
        self._calls = []
        for (part, decodes), (tokens, pages) in zip(parts, lists, strict=True):
            wrapper = self._wrapper(bucket, decodes)
            self._plan(wrapper, part, pages, decodes, bucket)
            self._calls.append((tokens, wrapper))

    def cache_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See AttentionPort. Returns None for an fp8 pool, for which K and V must be converted."""
        return None if self._is_fp8 else (self._pool.layers[layer], self._places[0])

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._pool.store(layer, k, v, *self._places[1:])

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        kv = self._kv[layer]
        # Without `out`, a prompt wrapper would allocate a tensor and launch a kernel to clear it, in each
        # layer.
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for places, wrapper in self._calls:
            if isinstance(places, slice):
                wrapper.run(q[places], kv, out=out[places])
            else:
                own = q.index_select(0, places)
                out.index_copy_(0, places, wrapper.run(own, kv, out=torch.empty_like(own)))
        return out

    def _plan(
        self, wrapper: Any, part: Part, pages: torch.Tensor, decodes: bool, bucket: Bucket | None
    ) -> None:
        """Plan `part` with `wrapper`. `pages`: the pages on the device. Other arrays are on the host."""
        spec, size = self._spec, self._block_size
        starts, last = torch.from_numpy(part.page_starts), torch.from_numpy(part.last_page_len)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, size)
        options: dict[str, Any] = {
            "q_data_type": self._dtype,
            "kv_data_type": FP8 if self._is_fp8 else self._dtype,
            "disable_split_kv": bucket is not None and bucket.num_rows * spec.num_kv_heads >= BUSY_HEADS,
        }
        host_plan = self._host_plans[decodes]
        if decodes:
            host_plan.plan(wrapper, starts, pages, last, *heads, **options)
            return
        queries = torch.from_numpy(part.query_starts)
        uniform = bucket.query_len if bucket is not None else None
        host_plan.plan(
            wrapper, queries, starts, pages, last, *heads, causal=True, uniform_q_len=uniform, **options
        )

    def _wrapper(self, bucket: Bucket | None, decodes: bool) -> Any:
        if bucket is None:
            return self._decode if decodes else self._prompt
        if bucket not in self._captured:
            self._captured[bucket] = self._make(decodes, bucket)
        return self._captured[bucket]

    def _make(self, decodes: bool, bucket: Bucket | None = None) -> Any:
        options: dict[str, Any] = {"backend": KERNELS}
        if bucket is not None:
            rows, (_, query_starts, page_starts, last_page_len, pages) = bucket.num_rows, self._buffers
            names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            parts = (page_starts[: rows + 1], pages[: rows * self._row_pages], last_page_len[:rows])
            ending = "_buffer" if decodes else "_buf"
            options |= {f"{name}{ending}": part for name, part in zip(names, parts, strict=True)}
            options["use_cuda_graph"] = True
            if not decodes:
                options["qo_indptr_buf"] = query_starts[: rows + 1]
        if decodes:
            options["use_tensor_cores"] = self._spec.num_heads // self._spec.num_kv_heads >= TENSOR_CORE_GROUP
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(self._floats, LAYOUT, **options)
        else:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._floats, LAYOUT, **options)
        return self._host_plans[decodes].attach(wrapper, self._floats)

    def _buffers_for(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Return the buffers for captured steps: places, query_starts, page_starts, last_page_len, pages.

        The places are int64 [3, t]. The other buffers are int32. For n rows, query_starts and page_starts
        have n + 1 entries, and last_page_len has n entries. The first call allocates the buffers, so the
        largest bucket must be captured first.
        """
        if not self._buffers:
            rows = bucket.num_rows
            sizes = (rows + 1, rows + 1, rows, rows * self._row_pages)
            columns = (torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes)
            places = torch.zeros(3, bucket.num_tokens, dtype=torch.int64, device=self._device)
            self._buffers = (places, *columns)
        return self._buffers

    def _upload(
        self, slots: np.ndarray, parts: list[Part]
    ) -> tuple[torch.Tensor, *tuple[tuple[slice | torch.Tensor, torch.Tensor], ...]]:
        """Copy a step's arrays to the device in a single transfer.

        Returns the slots and the pool indices for K and V, int64 [3, t]. Also returns a pair for each part:
        the part's token indices in the step (a slice, or int64), and its pages (int32).
        """
        num_tokens = len(slots)
        indices = [part.tokens for part in parts if not isinstance(part.tokens, slice)]
        num_pages = sum(len(part.pages) for part in parts)
        fixed = 3 * num_tokens + sum(map(len, indices))
        packed = np.empty(fixed + (num_pages + 1) // 2, np.int64)
        places = packed[: 3 * num_tokens].reshape(3, -1)
        kv_places(slots, self._block_size, places)
        if indices:
            np.concatenate(indices, out=packed[3 * num_tokens : fixed])
        np.concatenate([part.pages for part in parts], out=packed[fixed:].view(np.int32)[:num_pages])
        there = upload(packed, self._device)
        pages = there[fixed:].view(torch.int32)
        lists, at, first = [], 3 * num_tokens, 0
        for part in parts:
            tokens: slice | torch.Tensor
            if isinstance(part.tokens, slice):
                tokens = part.tokens
            else:
                tokens = there[at : at + len(part.tokens)]
                at += len(part.tokens)
            lists.append((tokens, pages[first : first + len(part.pages)]))
            first += len(part.pages)
        return there[: 3 * num_tokens].view(3, -1), *lists

    def _compile_and_run(self) -> None:
        """Compile missing kernels, and run a decode step and a prompt step in the dummy block.

        A missing compiler is thus reported at startup instead of in the first step. Raises ConfigError.
        """
        spec = self._spec
        for count in (1, 2):
            lengths = np.array([count], np.int32)
            slots, table = np.arange(count, dtype=np.int64), np.zeros((1, count), np.int32)
            zeros = torch.zeros(count, spec.num_heads, spec.head_dim, dtype=self._dtype, device=self._device)
            try:
                self.begin(AttentionMeta(lengths, lengths, slots, table))
                self.append(0, zeros[:, : spec.num_kv_heads], zeros[:, : spec.num_kv_heads])
                self.run(0, zeros)
            except Exception as error:  # compilers, loaders and drivers raise exceptions of any type
                raise ConfigError(
                    f"FlashInfer's kernels cannot be compiled or run on this machine "
                    f"({in_one_line(error)}); they need nvcc, ninja and a C++ compiler, or prebuilt kernels "
                    "(docs/how-to/gpu.md); otherwise choose attention 'torch'"
                ) from error
