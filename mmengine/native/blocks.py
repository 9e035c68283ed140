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

    `runs`: for each run of panels of the same type, the index of the first panel, and the type's number in
    GGUF files. A chunk is a pair: the index of its first row, and rows with the same type, uint8 [m, bytes
    per row]. Requires `multiplies_blocks`. In a bfloat16 layer a block of Q8_0 must not contain the code
    -128.
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
    """Return whether the library multiplies matrices of these types faster as int8 or int4 codes than as
    blocks.
    """
    return all(library.mm_linear_prefers_codes(number) for number in types)


def runs_of(types: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the runs for ChunkedBlocks if matrices are joined along their rows, or None if a panel would mix
    types.

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
