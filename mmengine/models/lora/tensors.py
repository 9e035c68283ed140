"""An adapter's matrices as tensors, joined as the model's own linear layers are."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mmengine.checkpoint.peft import AdapterFiles
from mmengine.checkpoint.tensors import TensorEntry
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.lora.modules import joined_modules
from mmengine.models.reader import STORED
from mmengine.native.lora import DECODER_LINEARS, LoraPart


class AdapterTensors:
    """Reads the matrices of `files` in a dtype, on a device. `modules`: (out, in) of what may be changed."""

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
        """What is added to these modules, whose outputs stand beside each other."""
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


def decoder_parts(config: DecoderConfig, tensors: AdapterTensors) -> Iterator[tuple[LoraPart, ...]]:
    """What is added to each linear layer of a decoder: those of native/lora.py, layer after layer."""
    for layer in range(config.num_layers):
        joined = joined_modules(config, layer)
        for name in DECODER_LINEARS:
            parts = tensors.parts(*joined.get(name, ()))
            if name == "qkv" and config.gated and not config.is_delta(layer):
                parts = tuple(_gates_behind(config, parts))
            yield parts


def _gates_behind(config: DecoderConfig, parts: Sequence[LoraPart]) -> Iterator[LoraPart]:
    """As decoder/layers.py orders q, k and v where q's heads have gates behind them: those come last."""
    heads, size = config.num_heads, config.head_dim
    gates = (heads + 2 * config.num_kv_heads) * size
    for part in parts:
        if part.offset:
            yield part._replace(offset=part.offset - heads * size)
            continue
        both = part.b.view(heads, 2, size, -1)
        for which, offset in ((0, 0), (1, gates)):
            yield part._replace(b=both[:, which].reshape(heads * size, -1).contiguous(), offset=offset)
