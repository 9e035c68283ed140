"""Linear layers that give a row the same bits in any number of rows, and at any place among them.

cuBLAS chooses a kernel, and into how many parts it splits the sums, by the number of rows. Here a tile of the
result is one program, which adds up along the whole depth, in one order. Tiles follow from the dtype and the
layer's width, never from the number of rows, and one binary computes any number of them. What shares a tile
with a row does not enter: rows that are missing are zeros. Not yet run on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 8  # tiles of rows that read the same weights one beside the other, so that they come from L2
ALIGNED = 16  # bytes: Triton compiles another kernel for what lies on other addresses


class Tile(NamedTuple):
    """What one program computes of y, [rows, columns]."""

    rows: int
    columns: int
    depth: int  # of one step along the sums
    stages: int  # of the pipeline that reads ahead


# The widest of which there are MANY beside one another: when one tile of rows decodes, some 2 MB of weights
# are then on their way, as much as a GPU's memory delivers within its latency. 64 rows are the fewest that
# sm_90's wgmma takes, and leave a step of one row bound by memory. Below sm_90 all fit into the 99 KiB that
# smaller GPUs share.
MANY = 64
TILES_16 = (Tile(64, 128, 64, 4), Tile(64, 64, 64, 6), Tile(64, 32, 128, 5))
# Without tensor cores, for float32 is not rounded to TF32.
TILE_32 = Tile(16, 64, 32, 3)


def tile_of(width: int, dtype: torch.dtype) -> Tile:
    """The tile of a layer of `width` outputs."""
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
    """A program: one tile of y. x [num_rows, DEPTH], weight [WIDTH, DEPTH], y [num_rows, WIDTH], no gaps."""
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
    """x [t, k] to x weight^T + bias, [t, n], weight [n, k], all of one dtype. Sums are float32."""
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
