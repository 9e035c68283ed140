"""Keep KV blocks in host memory, and copy them out and back in parallel with the computation.

    out:  blocks ──gather──► staged on the device ──side stream──► host     the computation goes on at once
    in:   host ──side stream──► staged on the device ──scatter──► blocks    the computation waits, the CPU not

Outgoing blocks are gathered on the layers' stream, so the same step may overwrite them. Both directions share
one stream and keep their order: a block is stored before it is fetched, and a host block is read before it is
overwritten. Neighbouring blocks in host memory are one copy.
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

# Largest piece of host memory: torch rounds pinned allocations up to a power of two.
SLAB_BYTES = 256 * 2**20


class HostBlocks:
    """KV blocks, over all layers, in host memory, pinned if the device is a GPU.

    The memory is divided into slabs [block, layer, 2, ...], so that a block is contiguous. `copy_stream`
    replaces the device's stream for copies.
    """

    def __init__(
        self,
        count: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: Device,
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Allocate `count` blocks with `block_shape`, [layers, 2, block_size, num_kv_heads, head_dim]. Raises
        ConfigError.
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
                f"{count} swap blocks need {count * block_bytes / 2**30:.2f} GiB of host memory, which could "
                "not be had; lower swap_blocks"
            ) from error
        self._device = device.torch_device
        self._copy_stream = copy_stream or (device.copy_stream() if count else InlineCopies())

    def store(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy device blocks [layers, n, 2, ...] to the host; `pairs` int32 [m, 2] (device block, host
        block).
        """
        for slab, there, here in self._by_slab(pairs[:, ::-1]):
            staged = blocks.index_select(1, self._index(there)).transpose(0, 1).contiguous()
            self._copy_stream.run(partial(_copy_out, slab, staged, here), staged)

    def fetch(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy host blocks to the device; `pairs` int32 [m, 2] (host block, device block)."""
        for slab, there, here in self._by_slab(pairs):
            shape = (len(here), *slab.shape[1:])
            staged = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
            self._copy_stream.run(partial(_copy_in, slab, staged, here), staged)
            self._copy_stream.join()
            blocks.index_copy_(1, self._index(there), staged.transpose(0, 1))

    def _by_slab(self, pairs: np.ndarray) -> Iterator[tuple[Tensor, np.ndarray, np.ndarray]]:
        """Split int32 [m, 2] (host block, device block) by slab: device blocks, and ascending places in the
        slab.
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
    """Return ascending block numbers as runs with neighbours: places [begin, end), and the block at
    `begin`.
    """
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
    ends = np.append(begins[1:], len(blocks))
    return list(zip(begins.tolist(), ends.tolist(), blocks[begins].tolist(), strict=True))
