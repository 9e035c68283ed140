"""Weights that keep the block format of a GGUF file: the Python side of src/linear/blocks.h."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32  # Rows per panel. All blocks of a panel have the same type.


class BlockRun(ctypes.Structure):
    """The C structure mm_block_run."""

    _fields_ = (("panel", ctypes.c_int32), ("type", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class ChunkedBlocks:
    """A weight [n, k] of a float32 layer, stored in GGUF blocks and delivered in chunks.

    `runs`: for each run of panels of the same type, the index of the first panel, and the type's number in
    GGUF files. A chunk is the index of its first row, and rows of one type as uint8 [m, bytes per row].
    Requires `multiplies_blocks`.
    """

    n: int
    k: int
    runs: tuple[tuple[int, int], ...]
    chunks: Iterable[tuple[int, Tensor]]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def run_array(self) -> "ctypes.Array[BlockRun]":
        return (BlockRun * len(self.runs))(*(BlockRun(*run) for run in self.runs))


def multiplies_blocks(library: ctypes.CDLL) -> bool:
    """Return whether the library has kernels for ChunkedBlocks: only with AVX2 and without AVX-512."""
    return bool(library.mm_linear_blocks())


def runs_of(types: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the runs of matrices that are joined along their rows, or None if a panel would mix types.

    `types`: the number of rows and the type's number of each matrix.
    """
    runs: list[tuple[int, int]] = []
    row = 0
    for count, number in types:
        if not runs or runs[-1][1] != number:
            if row % PANEL:
                return None
            runs.append((row // PANEL, number))
        row += count
    return tuple(runs)
