"""Keeps KV blocks in host memory, and copies blocks between host and device on a separate stream.

    out:  blocks ──gather──► staged on the device ──copy stream──► host     the device computes meanwhile
    in:   host ──copy stream──► staged on the device ──scatter──► blocks    the device waits, the CPU does not

Blocks that are swapped out are gathered on the layers' stream, so the same step may overwrite them.
Both directions use the same copy stream, in order. A block is therefore stored before it is fetched, and a
host block is read before it is overwritten. Adjacent blocks in host memory are copied together.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mmengine.errors import ConfigError
from mmengine.runtime.device.cpu import InlineCopies
from mmengine.runtime.device.port import CopyStream, Device
from mmengine.runtime.device.upload import upload

# Maximum size of an allocation in host memory. It is a power of two, because torch rounds pinned allocations
# up.
SLAB_BYTES = 256 * 2**20


class HostBlocks:
    """KV blocks in host memory. A block contains all layers. The memory is pinned if the device is a GPU.

    The memory is divided into slabs [block, layer, 2, ...] with contiguous blocks. `copy_stream`: the stream
    for copies. By default the device creates a stream.
    """

    def __init__(
        self,
        count: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Device,
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Allocate `count` blocks with the shape `block_shape`, [layers, 2, block_size, num_kv_heads,
        head_dim].

        Raises ConfigError if the memory is too small.
        """
        block_bytes = torch.Size(block_shape).numel() * dtype.itemsize
        self._per_slab = max(1, SLAB_BYTES // block_bytes)
        firsts = range(0, count, self._per_slab)
        try:
            self._slabs = [
                torch.zeros(
                    min(self._per_slab, count - first),
                    *block_shape,
                    dtype=dtype,
                    pin_memory=device.pins_memory,
                )
                for first in firsts
            ]
        except RuntimeError as error:
            raise ConfigError(
                f"{count} swap blocks need {count * block_bytes / 2**30:.2f} GiB of host memory, which "
                "cannot be allocated; lower swap_blocks"
            ) from error
        self._device = device.torch_device
        self._copy_stream = copy_stream or (device.copy_stream() if count else InlineCopies())

    def store(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy blocks from the device to the host.

        `blocks`: the pool on the device, [layers, n, 2, ...]. `pairs`: int32 [m, 2], (device block, host
        block).
        """
        for slab, there, here in self._by_slab(pairs[:, ::-1]):
            staged = blocks.index_select(1, self._index(there)).transpose(0, 1).contiguous()
            self._copy_stream.run(partial(_copy_out, slab, staged, here), staged)

    def fetch(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy blocks from the host to the device. `pairs`: int32 [m, 2], (host block, device block)."""
        for slab, there, here in self._by_slab(pairs):
            shape = (len(here), *slab.shape[1:])
            staged = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
            self._copy_stream.run(partial(_copy_in, slab, staged, here), staged)
            self._copy_stream.join()
            blocks.index_copy_(1, self._index(there), staged.transpose(0, 1))

    def _by_slab(self, pairs: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray]]:
        """Yield (slab, device blocks, indices in the slab) for each slab with blocks. The indices are
        ascending.

        `pairs`: int32 [m, 2], (host block, device block).
        """
        pairs = pairs[np.argsort(pairs[:, 0])]
        slabs, firsts = np.unique(pairs[:, 0] // self._per_slab, return_index=True)
        for number, own in zip(slabs.tolist(), np.split(pairs, firsts[1:]), strict=True):
            yield self._slabs[number], own[:, 1], own[:, 0] - number * self._per_slab

    def _index(self, blocks: np.ndarray) -> Tensor:
        return upload(blocks.astype(np.int64), self._device)


def _copy_out(slab: Tensor, staged: Tensor, places: np.ndarray) -> None:
    for begin, end, place in runs(places):
        slab[place : place + end - begin].copy_(staged[begin:end], non_blocking=True)


def _copy_in(slab: Tensor, staged: Tensor, places: np.ndarray) -> None:
    for begin, end, place in runs(places):
        staged[begin:end].copy_(slab[place : place + end - begin], non_blocking=True)


def runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """Divide ascending block numbers into runs of consecutive numbers.

    Returns (begin, end, first) for each run: `blocks[begin:end]` is the run, and `first` is its first number.
    """
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
    ends = np.append(begins[1:], len(blocks))
    return list(zip(begins.tolist(), ends.tolist(), blocks[begins].tolist(), strict=True))
