"""The KV pool: a single tensor for all layers, divided into blocks.

Its layout is `[layer, block, 2, block_size, num_kv_heads, head_dim]`. On the third axis K is at 0 and V at 1.
Each layer is therefore a tensor `[blocks, 2, ...]` with contiguous blocks. Block 0 is the dummy block, which
padding reads and writes. It never belongs to a request.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from mmengine.config import EngineConfig
from mmengine.core.executor import StepPlan
from mmengine.errors import ConfigError
from mmengine.models.layer_groups import block_spec
from mmengine.models.plugin import ModelSpec
from mmengine.native.linear import packed_buffer
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.port import CopyStream, Device
from mmengine.runtime.device.upload import upload
from mmengine.runtime.kv.swap import HostBlocks

FP8 = torch.float8_e4m3fn
_FP8_MOST = torch.finfo(FP8).max
MIN_BLOCKS = 2  # the dummy block and one usable block


def bytes_per_block(specs: Sequence[ModelSpec], dtype: torch.dtype, block_size: int) -> int:
    """Return a block's size in bytes: K and V for all layers of these models."""
    values = (2 * spec.num_kv_layers * block_size * spec.num_kv_heads * spec.head_dim for spec in specs)
    return sum(values) * dtype.itemsize


def blocks_for_memory(block_bytes: int, block_size: int, memory_bytes: int) -> int:
    """Return how many blocks, including the dummy block, fit into `memory_bytes`.

    Raises ConfigError if not even one usable block fits.
    """
    num_blocks = memory_bytes // block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{memory_bytes:,} bytes are too few for a KV cache: a block of {block_size} tokens takes "
            f"{block_bytes:,} bytes and {MIN_BLOCKS} are needed; provide more memory or lower block_size"
        )
    return num_blocks


class KVPool:
    """K and V in all blocks. `layers[i]` is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.

    Attention computes in `dtype`. With `is_fp8` the pool contains values that were rounded to float8_e4m3fn
    without scales. In this case `blocks` contains raw bytes (uint8), because some indexing operations do not
    support fp8.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: Device,
        swap_blocks: int = 0,
        *,
        is_fp8: bool = False,
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Allocate the pool. `copy_stream`: the stream for swaps. By default the device creates a stream.

        Raises ConfigError if the pool cannot be allocated.
        """
        self.device, self.dtype, self.is_fp8 = device, dtype, is_fp8
        dtype = torch.uint8 if is_fp8 else dtype
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"num_blocks must be at least {MIN_BLOCKS} (block 0 is a dummy), not {num_blocks}"
            )
        shape = (spec.num_kv_layers, num_blocks, 2, block_size, spec.num_kv_heads, spec.head_dim)
        try:
            self.blocks = fresh_zeros(shape, dtype, device)
        except (RuntimeError, MemoryError, ValueError, OSError, OverflowError) as error:
            need = num_blocks * bytes_per_block([spec], dtype, block_size)
            raise ConfigError(
                f"{num_blocks} KV blocks need {need / 2**30:.2f} GiB on {device.name}, which cannot be "
                "allocated; lower num_blocks"
            ) from error
        self._host = HostBlocks(swap_blocks, (spec.num_kv_layers, *shape[2:]), dtype, device, copy_stream)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tokens = [layer.view(-1, *shape[-2:]) for layer in self.blocks.unbind(0)]
        self.layers = tuple((self.blocks.view(FP8) if is_fp8 else self.blocks).unbind(0))

    def copy(self, plan: StepPlan) -> None:
        """Run a step's copies, in this order: swaps to the host, copies between blocks, swaps from the
        host.
        """
        if plan.swap_out is not None:
            self._host.store(self.blocks, plan.swap_out)
        if plan.copy is not None:
            sources, targets = upload(plan.copy.T.astype(np.int64), self.blocks.device)
            self.blocks[:, targets] = self.blocks[:, sources]
        if plan.swap_in is not None:
            self._host.fetch(self.blocks, plan.swap_in)

    def fetch(self, blocks: np.ndarray, rows: torch.Tensor) -> None:
        """Write KV from host memory, `rows` [n, layers, 2, ...], to `blocks` (ids, int32 [n])."""
        places = upload(blocks.astype(np.int64), self.blocks.device)
        self.blocks.index_copy_(1, places, rows.to(self.blocks.device).transpose(0, 1))

    def store(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, k_places: torch.Tensor, v_places: torch.Tensor
    ) -> None:
        """Store k and v [t, num_kv_heads, head_dim] at `k_places` and `v_places`, int64 [t] on the device."""
        if self.is_fp8:
            k, v = fp8_bytes(k), fp8_bytes(v)
        self._tokens[layer].index_copy_(0, k_places, k)
        self._tokens[layer].index_copy_(0, v_places, v)

    def clear(self, blocks: torch.Tensor) -> None:
        """Set `blocks` (int64 [f]) to zero in all layers.

        Call this method before the first slot in a block is written. Attention multiplies the unwritten end
        of a block by 0, and an earlier request's NaN would stay NaN.
        """
        self.blocks.index_fill_(1, blocks, 0)

    def close(self) -> None:
        """Free the pool's memory on a GPU, even if other objects still have views into the memory.

        The next engine in this process may need the memory. On a CPU nothing is freed, because a step that
        hangs may still read the memory.
        """
        if self.blocks.device.type != "cpu":
            self.blocks.untyped_storage().resize_(0)


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Return zeros. On a CPU the zeros are in fresh pages, which take memory only when written.

    This function avoids calloc, which may reuse freed memory and would then write zeros to all pages.
    """
    if device.torch_device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device.torch_device)
    pages = packed_buffer(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(pages).view(dtype).view(shape)


def pool_of(spec: ModelSpec, config: EngineConfig, placement: Placement) -> KVPool:
    """Return the pool for `config`, whose num_blocks must be set. Raises ConfigError."""
    return KVPool(
        block_spec(spec, config.block_groups),
        config.num_blocks,
        config.block_size,
        placement.dtype,
        placement.device,
        config.swap_blocks,
        is_fp8=config.kv_dtype == "fp8",
    )


def kv_places(slots: np.ndarray, block_size: int, out: np.ndarray) -> None:
    """Write `slots` [t], and the indices of their K and V in a layer, to `out`, int64 [3, t].

    For each block, a flattened layer has block_size entries for K, then block_size entries for V. K for slot
    s is at index s + block * block_size, and V follows block_size entries later. block_size must be a power
    of 2.
    """
    out[0] = slots
    np.add(slots, slots & -block_size, out=out[1])
    np.add(out[1], block_size, out=out[2])


def fp8_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return `x` rounded to fp8, as bytes (uint8).

    Too large values become the largest fp8 value, because an ordinary cast would yield NaN.
    """
    return x.clamp(-_FP8_MOST, _FP8_MOST).to(FP8).view(torch.uint8)
