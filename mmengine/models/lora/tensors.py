"""Loads a LoRA adapter's matrices as tensors, grouped by fused linear layer (q, k and v, for example)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mmengine.checkpoint.peft import AdapterFiles
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.models.reader import STORED
from mmengine.native.lora import LoraPart


class AdapterTensors:
    """Reads the matrices in `files`, in one dtype and on one device. `modules`: name -> (out, in) for each
    module that an adapter may change.
    """

    def __init__(
        self,
        files: AdapterFiles,
        modules: Mapping[str, tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._files, self._modules = files, modules
        self._device, self._dtype = device, dtype

    def parts(self, *modules: str) -> tuple[LoraPart, ...]:
        """Return the adapter's parts for a linear layer that fuses these modules in this order."""
        found, offset = [], 0
        for module in modules:
            pair = self._files.pairs.get(module)
            if pair is not None:
                found.append(LoraPart(self._read(pair.a), self._read(pair.b), offset, pair.scale))
            offset += self._modules[module][0] if module in self._modules else 0
        return tuple(found)

    def _read(self, entry: TensorEntry) -> Tensor:
        data = bytearray(self._files.data[entry.start : entry.start + entry.num_bytes])
        values = torch.frombuffer(data, dtype=STORED[entry.dtype]).view(entry.shape)
        return values.to(device=self._device, dtype=self._dtype)
