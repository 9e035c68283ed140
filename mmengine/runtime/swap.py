"""KV blocks in host memory, and the way there and back beside the computation.

    out:  blocks ──gather──► staged on the device ──side stream──► host     the computation goes on at once
    in:   host ──side stream──► staged on the device ──scatter──► blocks    the computation waits, the CPU not

What leaves is gathered where the layers run, so its blocks may be written to again by the same step. Both
directions share one stream and keep their order there: what comes back was stored before, and a host block is
not written to before it was read. Blocks that are neighbours in host memory are one copy.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmengine.errors import ConfigError
from mmengine.runtime.upload import upload


class Beside(Protocol):
    """A place where copies run in the order in which they come, beside the computation."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        """Have `copies`, which read or write `staged`, run when the computation so far has."""

    def join(self) -> None:
        """Let what is computed from here on see what they did."""


class SideStream:
    """A stream of its own (not yet run on a GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            copies()
        staged.record_stream(self._side)  # its memory is not given away before

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


class AtOnce:
    """On a CPU copies are done where they come."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        copies()

    def join(self) -> None:
        """Nothing runs beside."""


class HostBlocks:
    """Blocks of all layers in host memory, pinned beside a GPU: [block, layer, 2, ...], so that a block is
    one piece. `beside`: where copies run, if not as the device has it."""

    def __init__(
        self,
        count: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        beside: Beside | None = None,
    ) -> None:
        """`block_shape`: [layers, 2, block_size, num_kv_heads, head_dim]. Raises ConfigError."""
        on_gpu = device.type == "cuda"
        shape = (count, *block_shape)
        try:
            self._pool = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        except RuntimeError as error:
            need = torch.Size(shape).numel() * dtype.itemsize
            raise ConfigError(
                f"{count} swap blocks need {need / 2**30:.2f} GiB of host memory, which could not be had; "
                "lower swap_blocks"
            ) from error
        self._device = device
        self._beside = beside or (SideStream(device) if on_gpu and count else AtOnce())

    def store(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy blocks [layers, n, 2, ...] of the device out; int32 [m, 2] (device block, host block)."""
        pairs = pairs[np.argsort(pairs[:, 1])]
        staged = blocks.index_select(1, self._index(pairs[:, 0])).transpose(0, 1).contiguous()

        def copies() -> None:
            for begin, end, host in runs(pairs[:, 1]):
                self._pool[host : host + end - begin].copy_(staged[begin:end], non_blocking=True)

        self._beside.run(copies, staged)

    def fetch(self, blocks: Tensor, pairs: np.ndarray) -> None:
        """Copy host blocks back; int32 [m, 2] (host block, device block)."""
        pairs = pairs[np.argsort(pairs[:, 0])]
        staged = torch.empty((len(pairs), *self._pool.shape[1:]), dtype=blocks.dtype, device=blocks.device)

        def copies() -> None:
            for begin, end, host in runs(pairs[:, 0]):
                staged[begin:end].copy_(self._pool[host : host + end - begin], non_blocking=True)

        self._beside.run(copies, staged)
        self._beside.join()
        blocks.index_copy_(1, self._index(pairs[:, 1]), staged.transpose(0, 1))

    def _index(self, blocks: np.ndarray) -> Tensor:
        return upload(blocks.astype(np.int64), self._device)


def runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """Ascending block numbers as runs of neighbours: places [begin, end), and the block at `begin`."""
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
    ends = np.append(begins[1:], len(blocks))
    return list(zip(begins.tolist(), ends.tolist(), blocks[begins].tolist(), strict=True))
