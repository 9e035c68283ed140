"""Defines a vision tower's layers, and reads their weights."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.reader import WeightReader
from mmengine.models.vision.config import VisionConfig
from mmengine.models.vision.tensors import QKV
from mmengine.native.linear import PackedLinear


@dataclass(slots=True)
class Norm:
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, self.eps)


@dataclass(slots=True)
class TorchLinear:
    """A linear layer in torch with the interface of PackedLinear."""

    weight: Tensor  # [out, in].
    bias: Tensor | None

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias + residual. With a residual, the result is written to `out`; otherwise
        `out` is ignored.
        """
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else torch.add(residual, y, out=out)


class Linear(Protocol):
    """The interface of PackedLinear and TorchLinear."""

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor: ...


@dataclass(slots=True)
class Block:
    """The weights of one transformer layer in the tower."""

    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(slots=True)
class Merger:
    """A patch merger: norm, `fc1` with GELU, `fc2`. It converts merge x merge patches to one embedding for
    the text model. `fc1`: None for a linear merger.
    """

    norm: Norm
    norm_after_join: bool
    fc1: Linear | None
    fc2: Linear


class LayerReader:
    """Reads a tower's layers by canonical name. Linear layers use the CPU kernels in `library`, or torch if
    `library` is None.
    """

    def __init__(self, config: VisionConfig, weights: WeightReader, library: ctypes.CDLL | None) -> None:
        self._config, self._weights, self._library = config, weights, library

    def linear(self, *names: str, biased: bool = True) -> Linear:
        """Return a linear layer with the concatenated outputs of the layers `names`."""
        weights = [f"{name}.weight" for name in names]
        bias = self._weights.read(*(f"{name}.bias" for name in names)) if biased else None
        if self._library is None:
            return TorchLinear(self._weights.read(*weights).flatten(1), bias)
        return PackedLinear(self._library, self._weights.pieces(*weights), bias)

    def norm(self, name: str) -> Norm:
        weight, bias = self._weights.read(f"{name}.weight"), self._weights.read(f"{name}.bias")
        return Norm(weight, bias, self._config.norm_eps)

    def block(self, index: int) -> Block:
        name = f"visual.blocks.{index}"
        qkv = ("qkv",) if self._config.joined_qkv else QKV
        return Block(
            self.norm(f"{name}.norm1"),
            self.linear(*(f"{name}.attn.{part}" for part in qkv)),
            self.linear(f"{name}.attn.proj"),
            self.norm(f"{name}.norm2"),
            self.linear(f"{name}.mlp.linear_fc1"),
            self.linear(f"{name}.mlp.linear_fc2"),
        )

    def merger(self, name: str, *, norm_after_join: bool) -> Merger:
        norm = self.norm(f"{name}.norm")
        if self._config.linear_merger:
            return Merger(norm, norm_after_join, None, self.linear(f"{name}.linear", biased=False))
        fc1, fc2 = self.linear(f"{name}.linear_fc1"), self.linear(f"{name}.linear_fc2")
        return Merger(norm, norm_after_join, fc1, fc2)
