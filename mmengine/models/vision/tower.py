"""The vision tower. A single call encodes all images and videos in a step.

A patch attends to the patches in its own frame. An image is one frame, and a video has a frame for each
temporal patch. With the CPU kernels, and on a GPU in 16 bits, a layer computes attention for all frames in a
single call. With torch's operations, a layer makes a batched call for each frame length.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.gpu.vision_ops import vision_ops
from mmengine.models.progress import report_step
from mmengine.models.reader import WeightReader
from mmengine.models.vision.config import VisionConfig
from mmengine.models.vision.layers import Block, LayerReader, Merger
from mmengine.models.vision.segments import (
    Rotation,
    attend_native,
    attend_packed,
    attend_torch,
    attend_turned,
    upload,
)
from mmengine.native.library import load
from mmengine.native.vision import vision_kernels

# From this hidden size on, torch multiplies many float32 rows faster than the packed kernels.
_WIDE = 512
# Maximum number of patches in all cached GridTables together.
_MAX_CACHED_PATCHES = 16384
_MAX_INTERPOLATED = 4096  # Maximum number of patches whose positions are interpolated together.


# A function (qkv, out) that returns the attention output. `out`: a tensor that the function may overwrite, or
# None.
Attend = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(slots=True)
class GridTables:
    """Tables for all frames with the same height and width. Rows are in the order of the frame's patches."""

    positions: Tensor  # [patches, hidden], added to the patch embeddings.
    cos: Tensor  # float32 [patches, head_dim].
    sin: Tensor  # float32 [patches, head_dim], first half negated.


class VisionTower:
    """Encodes patches to embeddings for the text model, and to deepstack features."""

    def __init__(self, config: VisionConfig, weights: WeightReader, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._positions = weights.read("visual.pos_embed.weight")
        self.dtype = self._positions.dtype
        on_cpu = device.type == "cpu"
        self._kernels = vision_kernels(config.num_heads, config.head_dim, self.dtype) if on_cpu else None
        self.ops = vision_ops(device, self.dtype, config.head_dim)
        pays = config.hidden_size < _WIDE or self.dtype == torch.bfloat16
        library = load() if self._kernels is not None and pays else None
        read = LayerReader(config, weights, library)
        self._patch = read.linear("visual.patch_embed.proj")  # A convolution whose stride is its kernel size.
        self.blocks = [read.block(i) for i in range(config.depth)]
        self.merger = read.merger("visual.merger", norm_after_join=False)
        self.taps = {
            layer: read.merger(f"visual.deepstack_merger_list.{i}", norm_after_join=True)
            for i, layer in enumerate(config.deepstack_layers)
        }
        self._inv_freq = inverse_frequencies(config)
        self._tables: OrderedDict[tuple[int, int], GridTables] = OrderedDict()

    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Encode the items' concatenated patches, uint8 [p, patch_width]. `grids`: (t, h, w) for each item.

        Returns [sum of t * h * w / merge², (1 + num_deepstack) * out_hidden]: the merged embedding, then the
        deepstack features for the text model's layers 0, 1, … Raises ValueError if the grids do not have p
        patches in total, or if a side is not a multiple of the merge size.
        """
        self.check(patches, grids)
        pixels = patches.to(self.device, non_blocking=True)
        order = sorted(range(len(grids)), key=lambda i: grids[i][1] * grids[i][2])
        if self._kernels is not None or self.ops is not None or order == list(range(len(grids))):
            return self._forward(pixels, grids)
        sizes = [t * h * w for t, h, w in grids]
        parts = pixels.split(sizes)
        features = self._forward(torch.cat([parts[i] for i in order]), [grids[i] for i in order])
        parts = features.split([sizes[i] // self.config.merge_size**2 for i in order])
        return torch.cat([parts[order.index(i)] for i in range(len(grids))])

    def check(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        if patches.dtype != torch.uint8 or patches.shape[1:] != (self.config.patch_width,):
            raise ValueError(
                f"the patches of grids are uint8 [p, {self.config.patch_width}], not {patches.dtype} "
                f"{list(patches.shape)}"
            )
        self.check_grids(len(patches), grids)

    def check_grids(self, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> None:
        """Raise ValueError if the grids do not have `num_patches` patches, are empty, or cannot be merged."""
        merge = self.config.merge_size
        total = sum(t * h * w for t, h, w in grids)
        if num_patches != total or not total:
            raise ValueError(f"grids {list(grids)[:8]} need {total} patches, not {num_patches}")
        for t, h, w in grids:
            if min(t, h, w) < 1 or h % merge or w % merge:
                raise ValueError(
                    f"the sides of a grid must be positive multiples of {merge}, not {(t, h, w)}"
                )

    def _forward(self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Encode without checks. Torch's attention is faster if frames with equal lengths are adjacent."""
        frames = self.frames_of(grids)
        positions, cos, sin = (
            torch.cat([getattr(frame, name) for frame in frames]) for name in ("positions", "cos", "sin")
        )
        pack = Rotation(cos, sin, [len(frame.cos) for frame in frames])
        return self.compute(pixels, positions, self._attention(pack), hidden=positions)

    def frames_of(self, grids: Sequence[tuple[int, int, int]]) -> list[GridTables]:
        """Return the tables for each frame in these items."""
        return [self._grid_tables(h, w) for t, h, w in grids for _ in range(t)]

    def compute(
        self,
        pixels: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        hidden: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Encode pixels on the device and return the features. `features`: the tensor for the result, or
        None.

        `positions`: [p, hidden], added to the patch embeddings. `hidden`: a tensor to overwrite with the
        hidden states; may be `positions`.
        """
        hidden = self._patch(self._normalised(pixels), residual=positions, out=hidden)
        taps = []
        qkv = mixed = inner = None  # The first layer allocates these tensors, and later layers reuse them.
        for index, block in enumerate(self.blocks):
            qkv = block.qkv(block.norm1(hidden), out=qkv)
            mixed = attend(qkv, mixed)
            inner = self.finish_block(block, mixed, hidden, inner)
            if index in self.taps:
                taps.append(self.merge(self.taps[index], hidden))
            report_step()
        return torch.cat([self.merge(self.merger, hidden), *taps], dim=-1, out=features)

    def embed_patches(self, pixels: Tensor, hidden: Tensor) -> None:
        """Embed pixels on the device, uint8 [n, patch_width], and add the result to `hidden` [n, hidden],
        which already contains the position embeddings.
        """
        self._patch(self._normalised(pixels), residual=hidden, out=hidden)

    def finish_block(
        self, block: Block, mixed: Tensor, hidden: Tensor, inner: Tensor | None = None
    ) -> Tensor:
        """Compute a layer's operations after attention, and update `hidden` [n, hidden] in place.

        `mixed`: [n, hidden], the attention output for the same patches. Returns the MLP's intermediate
        tensor. A later call with n patches may pass this tensor as `inner`, to be overwritten.
        """
        block.proj(mixed, residual=hidden, out=hidden)
        inner = block.fc1(block.norm2(hidden), out=inner)
        block.fc2(self._gelu(inner), residual=hidden, out=hidden)
        return inner

    @property
    def has_kernels(self) -> bool:
        """Return whether the tower uses the CPU kernels."""
        return self._kernels is not None

    def attend_rows(self, qkv: Tensor, pack: Rotation, rows: slice) -> Tensor:
        """Return the attention output [n, hidden] for the patches `rows`, on a CPU. `qkv` has a row for each
        patch in `pack`. Without kernels (`has_kernels`), q and k must already be rotated.
        """
        if self._kernels is None:
            return attend_turned(qkv, self.config.num_heads, pack, rows)
        out = qkv.new_empty(rows.stop - rows.start, qkv.shape[1] // 3)
        self._kernels.attend(qkv, pack.starts, pack.cos, pack.sin, out, rows.start)
        return out

    def _normalised(self, pixels: Tensor) -> Tensor:
        if self._kernels is None:
            return normalise(pixels).to(self.dtype)
        numbers = torch.empty(pixels.shape, dtype=self.dtype)
        self._kernels.normalise(pixels.contiguous(), numbers)
        return numbers

    def _attention(self, pack: Rotation) -> Attend:
        """Return the function that computes attention for `pack`."""
        ops, kernels, num_heads = self.ops, self._kernels, self.config.num_heads
        if ops is not None:
            there = pack.there()
            return lambda qkv, out: attend_packed(ops, qkv, num_heads, there)
        if kernels is None:
            return lambda qkv, out: attend_torch(qkv, num_heads, pack)
        return lambda qkv, out: attend_native(kernels, qkv, pack, out)

    def _gelu(self, x: Tensor) -> Tensor:
        """Apply GELU, possibly in place."""
        if self._kernels is None or self.config.gelu != "tanh":
            return F.gelu(x, approximate=self.config.gelu)
        self._kernels.gelu(x)
        return x

    def merge(self, merger: Merger, hidden: Tensor) -> Tensor:
        width = self.config.merge_size**2 * self.config.hidden_size
        if merger.norm_after_join:
            joined = merger.norm(hidden.view(-1, width))
        else:
            joined = merger.norm(hidden).view(-1, width)
        return merger.fc2(joined if merger.fc1 is None else F.gelu(merger.fc1(joined)))

    def _grid_tables(self, height: int, width: int) -> GridTables:
        """Return a frame's tables, from the cache if possible."""
        key = (height, width)
        tables = self._tables.get(key)
        if tables is not None:
            self._tables.move_to_end(key)
            return tables
        tables = self._make_tables(height, width)
        self._tables[key] = tables
        while sum(h * w for h, w in self._tables) > _MAX_CACHED_PATCHES:
            self._tables.popitem(last=False)
        return tables

    def _make_tables(self, height: int, width: int) -> GridTables:
        rows, columns = patch_coordinates(height, width, self.config.merge_size)
        corners = interpolation(rows, columns, height, width, self.config.num_positions)
        taps, shares = (upload(torch.from_numpy(array), self.device) for array in corners)
        positions = torch.empty(len(rows), self.config.hidden_size, dtype=self.dtype, device=self.device)
        # Computed in pieces, because the intermediate tensor is four times as large as the result.
        for start in range(0, len(rows), _MAX_INTERPOLATED):
            some = slice(start, start + _MAX_INTERPOLATED)
            learned = F.embedding(taps[some], self._positions)  # [patches, 4, hidden].
            positions[some] = (learned * shares[some, :, None]).sum(1).to(self.dtype)
        coordinates = torch.from_numpy(np.stack((rows, columns), 1)).float()  # [patches, 2].
        angles = upload((coordinates[:, :, None] * self._inv_freq).flatten(1), self.device)
        cos, sin = angles.cos(), angles.sin()
        return GridTables(positions, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def inverse_frequencies(c: VisionConfig) -> Tensor:
    """Return the rotary frequencies, float32 [head_dim / 4] on the CPU. All are zero if the model has no
    rotary embedding.
    """
    quarter = c.head_dim // 2
    exponents = torch.arange(0, quarter, 2, dtype=torch.float) / quarter
    return torch.zeros_like(exponents) if c.rope_theta is None else 1.0 / c.rope_theta**exponents


def normalise(pixels: Tensor) -> Tensor:
    """Convert uint8 pixels to float32, (x / 255 - 0.5) / 0.5, with the same bits as transformers' Pillow
    backend.
    """
    return pixels.float().div_(255.0).sub_(0.5).div_(0.5)


def patch_coordinates(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each patch's row and column in a frame, int64 [height * width] each. The patches in a merge x
    merge window are adjacent."""
    windows = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return np.divmod(windows.swapaxes(1, 2).reshape(-1), width)


def interpolation(
    rows: np.ndarray, columns: np.ndarray, height: int, width: int, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each patch's four learned positions and their weights for interpolation: int64 [n, 4] and
    float32 [n, 4]. `rows`, `columns`: the patches' coordinates.

    The learned positions form a square. The interpolation is bilinear with aligned corners.
    """
    side = round(num_positions**0.5)
    row_taps, row_shares = _axis_taps(rows, height, side)
    column_taps, column_shares = _axis_taps(columns, width, side)
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    shares = row_shares[:, :, None] * column_shares[:, None, :]
    return taps.reshape(-1, 4), shares.reshape(-1, 4)


def _axis_taps(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    fraction = source - floor
    low = floor.astype(np.int64)
    taps = np.stack((low, np.minimum(low + 1, side - 1)), 1)
    return taps, np.stack((1 - fraction, fraction), 1)
