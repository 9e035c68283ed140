"""Adds a LoRA adapter to a vision tower's linear layers."""

import ctypes
from copy import copy
from dataclasses import dataclass, replace

from torch import Tensor

from mmengine.models.lora.tensors import AdapterTensors
from mmengine.models.lora.torch_linear import add_parts
from mmengine.models.vision.layers import Linear, Merger
from mmengine.models.vision.tensors import QKV
from mmengine.models.vision.tower import VisionTower
from mmengine.native.library import load
from mmengine.native.linear import PackedLinear
from mmengine.native.lora import LoraPart, PackedAdapter, add_all


@dataclass(slots=True)
class TorchAdded:
    """A torch linear layer with a LoRA adapter."""

    linear: Linear
    parts: tuple[LoraPart, ...]

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self.linear(x, residual=residual, out=out)
        add_parts(x, y, self.parts)
        return y


@dataclass(slots=True)
class NativeAdded:
    """A native linear layer with a LoRA adapter."""

    linear: Linear
    library: ctypes.CDLL
    packed: PackedAdapter

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = self.linear(x, residual=residual, out=out)
        add_all(self.library, self.packed, x, y)
        return y


def adapted_tower(tower: VisionTower, tensors: AdapterTensors) -> VisionTower:
    """Return a tower with the adapter. Layers that the adapter does not change are shared with `tower`."""

    def added(linear: Linear | None, *names: str) -> Linear | None:
        parts = tensors.parts(*names)
        if linear is None or not parts:
            return linear
        library = load() if isinstance(linear, PackedLinear) else None
        if library is None:
            return TorchAdded(linear, parts)
        return NativeAdded(linear, library, PackedAdapter([parts]))

    def merger(of: Merger, name: str) -> Merger:
        last = "linear" if of.fc1 is None else "linear_fc2"
        return replace(
            of, fc1=added(of.fc1, f"{name}.linear_fc1"), fc2=_some(added(of.fc2, f"{name}.{last}"))
        )

    other = copy(tower)
    qkv = ("qkv",) if tower.config.joined_qkv else QKV
    other.blocks = [
        replace(
            block,
            qkv=_some(added(block.qkv, *(f"visual.blocks.{i}.attn.{part}" for part in qkv))),
            proj=_some(added(block.proj, f"visual.blocks.{i}.attn.proj")),
            fc1=_some(added(block.fc1, f"visual.blocks.{i}.mlp.linear_fc1")),
            fc2=_some(added(block.fc2, f"visual.blocks.{i}.mlp.linear_fc2")),
        )
        for i, block in enumerate(tower.blocks)
    ]
    other.merger = merger(tower.merger, "visual.merger")
    other.taps = {
        layer: merger(tap, f"visual.deepstack_merger_list.{i}")
        for i, (layer, tap) in enumerate(tower.taps.items())
    }
    return other


def _some(linear: Linear | None) -> Linear:
    assert linear is not None
    return linear
