"""Batch-invariant linear layers: a row's bits do not depend on the row count or the row's index.

cuBLAS chooses a kernel by the row count, and the kernel determines how sums are split. Here, a program
computes one tile of the result and sums over the whole depth in a fixed order. Tile sizes depend only on the
dtype and the layer's width. Not yet run on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8  # number of row tiles that run together and share weights in the L2 cache
ALIGNED = 16  # alignment of addresses in bytes; for other addresses Triton compiles another kernel


class Tile(NamedTuple):
    """The tile [rows, columns] of y that one program computes, and the parameters of the program's loop."""

    rows: int
    columns: int
    depth: int  # the loop's step along the depth
    stages: int  # length of the prefetch pipeline


# A 16-bit layer uses the widest tile that divides its columns into at least MANY tiles. A decode step with a
# single row tile then has about 2 MB of weights in flight, enough to hide the memory latency. TILES_16 have
# 64 rows, because sm_90's wgmma needs at least 64. Empty rows cost little time, because small steps are
# memory-bound. On GPUs below sm_90, all tiles fit into 99 KiB of shared memory.
MANY = 64
TILES_16 = (Tile(64, 128, 64, 4), Tile(64, 64, 64, 6), Tile(64, 32, 128, 5))
# float32 does not use tensor cores, because they would round it to TF32.
TILE_32 = Tile(16, 64, 32, 3)


def tile_of(width: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a layer with `width` outputs."""
    if dtype.itemsize > 2:
        return TILE_32
    return next((tile for tile in TILES_16 if width >= MANY * tile.columns), TILES_16[-1])


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    y,
    num_rows,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Each program computes one tile of y. The tensors x [num_rows, DEPTH], weight [WIDTH, DEPTH] and y
    [num_rows, WIDTH] are contiguous.
    """
    program = tl.program_id(0)
    COLUMN_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    first = program // (GROUP * COLUMN_TILES) * GROUP
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    inside = program % (GROUP * COLUMN_TILES)
    row = (first + inside % height).to(tl.int64) * ROWS
    column = (inside // height).to(tl.int64) * COLUMNS
    rows, columns, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    is_row = (row + rows < num_rows)[:, None]
    is_column = column + columns < WIDTH
    x_at = x + row * DEPTH + rows[:, None] * DEPTH + depth[None, :]
    weight_at = weight + column * DEPTH + columns[None, :] * DEPTH + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, STEP):
        if DEPTH % STEP == 0:
            part = tl.load(x_at, mask=is_row, other=0.0)
            weights = tl.load(weight_at, mask=is_column[None, :], other=0.0)
        else:
            left = start + depth < DEPTH
            part = tl.load(x_at, mask=is_row & left[None, :], other=0.0)
            weights = tl.load(weight_at, mask=is_column[None, :] & left[:, None], other=0.0)
        total = tl.dot(part, weights, total, input_precision="ieee")
        x_at += STEP
        weight_at += STEP
    if HAS_BIAS:
        total += tl.load(bias + column + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    y_at = y + row * WIDTH + column + rows[:, None] * WIDTH + columns[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_row & is_column[None, :])


def fixed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that maps x [t, k] to x weight^T + bias, [t, n]. `weight`: [n, k].

    All tensors have one dtype. Sums are computed in float32.
    """
    weight = weight.contiguous()
    width, depth = weight.shape
    tile = tile_of(width, weight.dtype)
    column_tiles = triton.cdiv(width, tile.columns)

    def multiply(x: Tensor) -> Tensor:
        if not x.is_contiguous() or x.data_ptr() % ALIGNED:
            x = x.clone(memory_format=torch.contiguous_format)
        y = x.new_empty(len(x), width)
        _linear_kernel[(triton.cdiv(len(x), tile.rows) * column_tiles,)](
            x,
            weight,
            weight if bias is None else bias,
            y,
            len(x),
            WIDTH=width,
            DEPTH=depth,
            HAS_BIAS=bias is not None,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            STEP=tile.depth,
            GROUP=GROUP,
            num_warps=4,
            num_stages=tile.stages,
        )
        return y

    return multiply
