"""Weights in a GGUF file's blocks: the Python side of src/linear/blocks.h."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 32  # Rows of a weight in a panel, which has a single type.


class BlockRun(ctypes.Structure):
    """The C structure mm_block_run."""

    _fields_ = (("panel", ctypes.c_int32), ("type", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class ChunkedBlocks:
    """A weight [n, k] of a float32 layer, stored in GGUF's blocks and delivered in chunks.

    `runs`: for each run of panels with the same type, its first panel and the type's number in GGUF files. A
    chunk is the index of its first row, and uint8 [m, bytes of a row]; its rows have one type. Requires
    `multiplies_blocks`.
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
    """Return whether there are kernels for ChunkedBlocks: only with AVX2 and without AVX-512."""
    return bool(library.mm_linear_blocks())


def runs_of(types: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the runs for matrices that are joined along their rows, or None if a panel would have two types.

    `types`: each matrix's number of rows, and its type's number.
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
