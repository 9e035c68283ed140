"""Weights that keep the block format of a GGUF file: the Python side of src/linear/blocks.h."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmengine.native.dtypes import DTYPES

PANEL = 32  # Rows per panel. All blocks of a panel have the same type.


class BlockRun(ctypes.Structure):
    """The C structure mm_block_run."""

    _fields_ = (("panel", ctypes.c_int32), ("type", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class ChunkedBlocks:
    """A weight [n, k] that is stored in GGUF blocks and delivered in chunks. `dtype`: the layer's dtype.

    `runs`: a pair (first panel, GGUF type number) for each run of panels with the same type. `chunks`: pairs
    (first row, rows uint8 [m, bytes per row]); a chunk has a single type. Usable only if `multiplies_blocks`
    returns True. In a bfloat16 layer a block of Q8_0 must not contain the code -128.
    """

    n: int
    k: int
    runs: tuple[tuple[int, int], ...]
    chunks: Iterable[tuple[int, Tensor]]
    dtype: torch.dtype = torch.float32

    def run_array(self) -> "ctypes.Array[BlockRun]":
        return (BlockRun * len(self.runs))(*(BlockRun(*run) for run in self.runs))


def multiplies_blocks(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Return whether layers of this dtype may have ChunkedBlocks. The result is True for float32. For
    bfloat16 the CPU must have AVX-512's bfloat16 instructions.
    """
    return dtype in DTYPES and bool(library.mm_linear_blocks(DTYPES[dtype]))


def prefers_codes(library: ctypes.CDLL, types: Iterable[int]) -> bool:
    """Return whether int8 or int4 codes multiply faster than blocks for matrices of these types."""
    return all(library.mm_linear_prefers_codes(number) for number in types)


def runs_of(types: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return ChunkedBlocks.runs for matrices that are stacked by rows, or None if a panel would mix types.

    `types`: (row count, type number) for each matrix.
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
