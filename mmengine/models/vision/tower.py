"""The vision tower, over all images and videos of a step at once.

A patch attends to the patches of its own frame (an image is one frame, a video one a temporal patch).
With the CPU kernels, and on a GPU in 16 bits, attention is one call a layer, whatever the frames' lengths;
with torch alone frames of equal length are brought together, a batched call per length and layer.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.gpu.vision_ops import vision_ops
from mmengine.models.reader import WeightReader
from mmengine.models.vision.config import VisionConfig
from mmengine.models.vision.grid_positions import interpolation, patch_coordinates
from mmengine.models.vision.segments import (
    Rotation,
    attend_native,
    attend_packed,
    attend_torch,
    upload,
)
from mmengine.native.library import load
from mmengine.native.linear import PackedLinear
from mmengine.native.vision import vision_kernels

_WIDE = 512  # hidden size from which torch's float32 products of many rows are faster than packed ones
_MAX_CACHED_PATCHES = 16384  # grids whose position tables are kept, by patches of one frame


@dataclass(slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, self.eps)


@dataclass(slots=True)
class TorchLinear:
    """What PackedLinear is without the kernels."""

    weight: Tensor  # [out, in]
    bias: Tensor

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Without a residual, `out` is left as it is."""
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else torch.add(residual, y, out=out)


_Linear = PackedLinear | TorchLinear
Attend = Callable[[Tensor, Tensor | None], Tensor]  # qkv and what may be written over, to what is attended


@dataclass(slots=True)
class _Block:
    norm1: _Norm
    qkv: _Linear
    proj: _Linear
    norm2: _Norm
    fc1: _Linear
    fc2: _Linear


@dataclass(slots=True)
class _Merger:
    """Joins merge x merge patches into one embedding of the text model's width."""

    norm: _Norm
    norm_after_join: bool
    fc1: _Linear
    fc2: _Linear


@dataclass(slots=True)
class GridTables:
    """What depends on a frame's height and width alone, in the order of its patches."""

    positions: Tensor  # [patches, hidden], added to the patch embeddings
    cos: Tensor  # float32 [patches, head_dim]
    sin: Tensor  # float32 [patches, head_dim], first half negated


class VisionTower:
    """Patches to embeddings, and the deepstack features taken on the way."""

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
        read = _Reader(weights, library, config.norm_eps)
        self._patch = read.linear("visual.patch_embed.proj")  # a convolution whose stride is its kernel
        self._blocks = [read.block(i) for i in range(config.depth)]
        self._merger = read.merger("visual.merger", norm_after_join=False)
        self._taps = {
            layer: read.merger(f"visual.deepstack_merger_list.{i}", norm_after_join=True)
            for i, layer in enumerate(config.deepstack_layers)
        }
        quarter = config.head_dim // 2
        exponents = torch.arange(0, quarter, 2, dtype=torch.float) / quarter
        self._inv_freq = 1.0 / config.rope_theta**exponents  # [head_dim / 4], on the CPU
        self._tables: OrderedDict[tuple[int, int], GridTables] = OrderedDict()

    def encode(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """uint8 [p, patch_width], the items' patches one after the other, and their grids (t, h, w)
        to [sum of t * h * w / merge², (1 + num_deepstack) * out_hidden]: the merged embedding, then
        the deepstack features in the order the text model adds them. ValueError if p is not the
        grids' sum or a side is no multiple of the merge size."""
        self._check(patches, grids)
        pixels = patches.to(self.device, non_blocking=True)
        order = sorted(range(len(grids)), key=lambda i: grids[i][1] * grids[i][2])
        if self._kernels is not None or self.ops is not None or order == list(range(len(grids))):
            return self._forward(pixels, grids)
        sizes = [t * h * w for t, h, w in grids]
        parts = pixels.split(sizes)
        features = self._forward(torch.cat([parts[i] for i in order]), [grids[i] for i in order])
        parts = features.split([sizes[i] // self.config.merge_size**2 for i in order])
        return torch.cat([parts[order.index(i)] for i in range(len(grids))])

    def _check(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> None:
        if patches.dtype != torch.uint8 or patches.shape[1:] != (self.config.patch_width,):
            raise ValueError(
                f"the patches of grids are uint8 [p, {self.config.patch_width}], not {patches.dtype} "
                f"{list(patches.shape)}"
            )
        self.check_grids(len(patches), grids)

    def check_grids(self, num_patches: int, grids: Sequence[tuple[int, int, int]]) -> None:
        """ValueError where there are other patches, or none, or such that cannot be merged."""
        merge = self.config.merge_size
        total = sum(t * h * w for t, h, w in grids)
        if num_patches != total or not total:
            raise ValueError(f"grids {list(grids)[:8]} need {total} patches, not {num_patches}")
        for t, h, w in grids:
            if min(t, h, w) < 1 or h % merge or w % merge:
                raise ValueError(
                    f"a grid must be positive with sides of multiples of {merge}, not {(t, h, w)}"
                )

    def _forward(self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """As `encode`, without its checks; torch's attention wants frames of equal length together."""
        frames = self.frames_of(grids)
        positions, cos, sin = (
            torch.cat([getattr(frame, name) for frame in frames]) for name in ("positions", "cos", "sin")
        )
        pack = Rotation(cos, sin, [len(frame.cos) for frame in frames])
        return self.compute(pixels, positions, self._attention(pack), hidden=positions)

    def frames_of(self, grids: Sequence[tuple[int, int, int]]) -> list[GridTables]:
        """The tables of each frame of these items."""
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
        """What `encode` gives, of pixels on the device and the positions that are added to them; into
        `features` where given. `hidden`: room for the hidden states, which may be `positions`."""
        hidden = self._patch(self._normalised(pixels), residual=positions, out=hidden)
        taps = []
        qkv = mixed = inner = None  # made by the first layer, written over by the others
        for index, block in enumerate(self._blocks):
            qkv = block.qkv(block.norm1(hidden), out=qkv)
            mixed = attend(qkv, mixed)
            block.proj(mixed, residual=hidden, out=hidden)
            inner = block.fc1(block.norm2(hidden), out=inner)
            block.fc2(self._gelu(inner), residual=hidden, out=hidden)
            if index in self._taps:
                taps.append(self._merge(self._taps[index], hidden))
        return torch.cat([self._merge(self._merger, hidden), *taps], dim=-1, out=features)

    def _normalised(self, pixels: Tensor) -> Tensor:
        if self._kernels is None:
            return normalise(pixels).to(self.dtype)
        numbers = torch.empty(pixels.shape, dtype=self.dtype)
        self._kernels.normalise(pixels.contiguous(), numbers)
        return numbers

    def _attention(self, pack: Rotation) -> Attend:
        """What attends, and may write into what it is given."""
        ops, kernels, num_heads = self.ops, self._kernels, self.config.num_heads
        if ops is not None:
            there = pack.there()
            return lambda qkv, out: attend_packed(ops, qkv, num_heads, there)
        if kernels is None:
            return lambda qkv, out: attend_torch(qkv, num_heads, pack)
        return lambda qkv, out: attend_native(kernels, qkv, pack, out)

    def _gelu(self, x: Tensor) -> Tensor:
        """May write over `x`."""
        if self._kernels is None or self.config.gelu != "tanh":
            return F.gelu(x, approximate=self.config.gelu)
        self._kernels.gelu(x)
        return x

    def _merge(self, merger: _Merger, hidden: Tensor) -> Tensor:
        width = self.config.merge_size**2 * self.config.hidden_size
        if merger.norm_after_join:
            joined = merger.norm(hidden.view(-1, width))
        else:
            joined = merger.norm(hidden).view(-1, width)
        return merger.fc2(F.gelu(merger.fc1(joined)))

    def _grid_tables(self, height: int, width: int) -> GridTables:
        """Tables of one frame; the last used are kept, up to a bound on their patches together."""
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
        learned = F.embedding(taps, self._positions)  # [patches, 4, hidden]
        positions = (learned * shares[:, :, None]).sum(1).to(self.dtype)
        coordinates = torch.from_numpy(np.stack((rows, columns), 1)).float()  # [patches, 2]
        angles = upload((coordinates[:, :, None] * self._inv_freq).flatten(1), self.device)
        cos, sin = angles.cos(), angles.sin()
        return GridTables(positions, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def normalise(pixels: Tensor) -> Tensor:
    """uint8 to float32, (x / 255 - 0.5) / 0.5: bit for bit what the reference's Pillow backend gives."""
    return pixels.float().div_(255.0).sub_(0.5).div_(0.5)


class _Reader:
    """Layers by their canonical names; `library` None: torch's linears."""

    def __init__(self, weights: WeightReader, library: ctypes.CDLL | None, norm_eps: float) -> None:
        self._weights, self._library, self._norm_eps = weights, library, norm_eps

    def linear(self, name: str) -> _Linear:
        weight, bias = f"{name}.weight", self._weights.read(f"{name}.bias")
        if self._library is None:
            return TorchLinear(self._weights.read(weight).flatten(1), bias)
        return PackedLinear(self._library, self._weights.pieces(weight), bias)

    def norm(self, name: str) -> _Norm:
        weight, bias = self._weights.read(f"{name}.weight"), self._weights.read(f"{name}.bias")
        return _Norm(weight, bias, self._norm_eps)

    def block(self, index: int) -> _Block:
        name = f"visual.blocks.{index}"
        return _Block(
            self.norm(f"{name}.norm1"),
            self.linear(f"{name}.attn.qkv"),
            self.linear(f"{name}.attn.proj"),
            self.norm(f"{name}.norm2"),
            self.linear(f"{name}.mlp.linear_fc1"),
            self.linear(f"{name}.mlp.linear_fc2"),
        )

    def merger(self, name: str, *, norm_after_join: bool) -> _Merger:
        fc1, fc2 = self.linear(f"{name}.linear_fc1"), self.linear(f"{name}.linear_fc2")
        return _Merger(self.norm(f"{name}.norm"), norm_after_join, fc1, fc2)
