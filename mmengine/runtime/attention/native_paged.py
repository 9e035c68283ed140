"""Paged attention on a CPU by native C++ kernels, which read K and V directly from the blocks.

The kernels support windows, chunks, soft caps, sinks and scales, but not bidirectional attention.
"""

import ctypes

import numpy as np
import torch

from mmengine.errors import ConfigError
from mmengine.models.plugin import LayerAttention, ModelSpec
from mmengine.native.dtypes import DTYPES
from mmengine.native.library import describe, load
from mmengine.runtime.attention.base import AttentionMeta, Bucket
from mmengine.runtime.kv.pool import KVPool

MAX_HEAD_DIM = 512

_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


class Step(ctypes.Structure):
    """The C struct mm_attention_step, which native/src/attention/attention.h defines."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_rows", "num_tokens", "table_stride", "block_size")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("dtype", "tiles_only")),
        *((name, _ADDRESS) for name in ("query_starts", "kv_lens", "num_drafts", "block_table", "slots")),
    )


class LayerRules(ctypes.Structure):
    """The C struct mm_attention_layer: one layer's features."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("window", "chunk", "value_dim")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )

    @classmethod
    def of(cls, layer: LayerAttention) -> "LayerRules":
        return cls(layer.window, layer.chunk, layer.value_dim, layer.scale, layer.softcap)


class NativePagedAttention:
    """Implements AttentionBackend. A row's result does not depend on the batch or on the number of threads.

    With `tiles_only`, a token's result is also the same for any chunk length.
    """

    reads_unwritten = False
    captures = False

    def __init__(
        self, spec: ModelSpec, kv: KVPool, library: ctypes.CDLL | None = None, *, tiles_only: bool = False
    ) -> None:
        """Build the backend. `library`: the compiled kernels (default: the process's own kernels).

        Raises ConfigError if the kernels are not available, or do not support the shape or the dtype.
        """
        problem = unfit(spec, kv)
        library = library or load()
        if problem or library is None:
            reason = problem or describe()
            raise ConfigError(f"attention 'native' cannot be used: {reason}; choose 'torch' or 'auto'")
        self._append, self._run = library.mm_attention_append, library.mm_attention_run
        self._append.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE]
        self._append.restype = None
        self._run.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE]
        self._run.restype = ctypes.c_int32
        self._run_layer = library.mm_attention_run_layer
        self._run_layer.argtypes = [*(_ADDRESS,) * 5, _SIZE, _ADDRESS, _SIZE]
        self._run_layer.restype = ctypes.c_int32
        self._layers = (_ADDRESS * len(kv.layers))(*(layer.data_ptr() for layer in kv.layers))
        self._pool = kv  # keeps the memory alive
        self._step = Step(
            block_size=kv.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=DTYPES[kv.blocks.dtype],
            tiles_only=tiles_only,
        )
        self._arrays: tuple[np.ndarray | None, ...] = ()

    def begin(self, meta: AttentionMeta, bucket: Bucket | None = None) -> None:
        torch.get_num_threads()  # this call makes torch set the thread's number of OpenMP threads
        starts = np.zeros(len(meta.query_lens) + 1, np.int32)
        np.cumsum(meta.query_lens, out=starts[1:])
        kv_lens = np.ascontiguousarray(meta.kv_lens, np.int32)
        slots = np.ascontiguousarray(meta.slots, np.int64)
        table = meta.table
        if table.dtype != np.int32 or table.strides[1] != 4:
            table = np.ascontiguousarray(table, np.int32)
        step = self._step
        step.num_rows, step.num_tokens = len(kv_lens), len(slots)
        step.table_stride = table.strides[0] // 4
        step.query_starts, step.kv_lens = starts.ctypes.data, kv_lens.ctypes.data
        step.block_table, step.slots = table.ctypes.data, slots.ctypes.data
        drafts = None if meta.num_drafts is None else np.ascontiguousarray(meta.num_drafts, np.int32)
        step.num_drafts = None if drafts is None else drafts.ctypes.data
        # Keeps the arrays alive, because the step has pointers to their memory.
        self._arrays = starts, kv_lens, slots, table, drafts

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        k, v = _rows(k), _rows(v)
        self._append(
            self.step_address(), self._layers[layer], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)
        )

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        failed = self._run(
            self.step_address(), self._layers[layer], q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)
        )
        if failed:
            raise MemoryError("not enough memory for the attention of this step")
        return out

    def run_layer(
        self, place: int, q: torch.Tensor, rules: LayerRules, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of `q` over the pool's KV layer `place`. `sinks`: [num_heads]."""
        q, scores = _rows(q), None if sinks is None else sinks.float().contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        failed = self._run_layer(
            self.step_address(),
            ctypes.addressof(rules),
            None if scores is None else scores.data_ptr(),
            self._layers[place],
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
        if failed:
            raise MemoryError("not enough memory for the attention of this step")
        return out

    def step_address(self) -> int:
        """Return the address of the mm_attention_step for C++ code. The address is valid until the next
        `begin`.
        """
        return ctypes.addressof(self._step)

    def layers_address(self) -> int:
        """Return the address of an array with each layer's KV address, for C++ code."""
        return ctypes.addressof(self._layers)


def unfit(spec: ModelSpec, kv: KVPool) -> str | None:
    """Return why the kernels do not support this pool, or None if they do."""
    device, dtype = kv.blocks.device, kv.layers[0].dtype
    if device.type != "cpu":
        return f"it computes on a CPU, but the KV pool is on {device}"
    if dtype not in DTYPES:
        return f"it supports float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
        return f"it supports heads of 8, 16, 24 … {MAX_HEAD_DIM} values, not of {spec.head_dim}"
    return None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [t, heads, head_dim] with contiguous memory for each token's heads."""
    if x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.contiguous()
