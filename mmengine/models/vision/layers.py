"""The layers of a vision tower, and how they are read."""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.reader import WeightReader
from mmengine.native.linear import PackedLinear


@dataclass(slots=True)
class Norm:
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


Linear = PackedLinear | TorchLinear


@dataclass(slots=True)
class Block:
    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(slots=True)
class Merger:
    """Joins merge x merge patches into one embedding of the text model's width."""

    norm: Norm
    norm_after_join: bool
    fc1: Linear
    fc2: Linear


class LayerReader:
    """Layers by their canonical names; `library` None: torch's linears."""

    def __init__(self, weights: WeightReader, library: ctypes.CDLL | None, norm_eps: float) -> None:
        self._weights, self._library, self._norm_eps = weights, library, norm_eps

    def linear(self, name: str) -> Linear:
        weight, bias = f"{name}.weight", self._weights.read(f"{name}.bias")
        if self._library is None:
            return TorchLinear(self._weights.read(weight).flatten(1), bias)
        return PackedLinear(self._library, self._weights.pieces(weight), bias)

    def norm(self, name: str) -> Norm:
        weight, bias = self._weights.read(f"{name}.weight"), self._weights.read(f"{name}.bias")
        return Norm(weight, bias, self._norm_eps)

    def block(self, index: int) -> Block:
        name = f"visual.blocks.{index}"
        return Block(
            self.norm(f"{name}.norm1"),
            self.linear(f"{name}.attn.qkv"),
            self.linear(f"{name}.attn.proj"),
            self.norm(f"{name}.norm2"),
            self.linear(f"{name}.mlp.linear_fc1"),
            self.linear(f"{name}.mlp.linear_fc2"),
        )

    def merger(self, name: str, *, norm_after_join: bool) -> Merger:
        fc1, fc2 = self.linear(f"{name}.linear_fc1"), self.linear(f"{name}.linear_fc2")
        return Merger(self.norm(f"{name}.norm"), norm_after_join, fc1, fc2)
