"""Converts a LoRA adapter to low-rank products that a decoder's linear layers add to their outputs. A linear
layer may join several modules that the adapter names separately.
"""

from collections.abc import Iterator, Sequence

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.tensors import layer_name
from mmengine.models.lora.tensors import AdapterTensors
from mmengine.native.lora import DECODER_LINEARS, LoraPart


def decoder_parts(config: DecoderConfig, tensors: AdapterTensors) -> Iterator[tuple[LoraPart, ...]]:
    """Yield the additions to each linear layer in a decoder, layer by layer, in the order of
    DECODER_LINEARS.
    """
    for layer in range(config.num_layers):
        joined = _joined_modules(config, layer)
        for name in DECODER_LINEARS:
            parts = tensors.parts(*joined.get(name, ()))
            if name == "qkv" and config.gated and not config.is_delta(layer):
                parts = tuple(_gates_behind(config, parts))
            yield parts


def _gates_behind(config: DecoderConfig, parts: Sequence[LoraPart]) -> Iterator[LoraPart]:
    """Yield the additions to q, k and v in a gated decoder. The gates are moved to the end, as `gates_behind`
    in layers.py does with the weights.
    """
    heads, size = config.num_heads, config.head_dim
    gates = (heads + 2 * config.num_kv_heads) * size
    for part in parts:
        if part.offset:
            yield part._replace(offset=part.offset - heads * size)
            continue
        both = part.b.view(heads, 2, size, -1)
        for which, offset in ((0, 0), (1, gates)):
            yield part._replace(b=both[:, which].reshape(heads * size, -1).contiguous(), offset=offset)


def _joined_modules(config: DecoderConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """Return the modules that each linear layer joins, in the order of their outputs. The keys are names from
    DECODER_LINEARS.
    """
    beginning = layer_name(layer)
    found: dict[str, tuple[str, ...]] = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
    }
    if config.is_delta(layer):
        found = {
            "qkv": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
            "out": ("linear_attn.out_proj",),
        }
    if config.experts_of(layer) is None:
        found |= {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
    return {name: tuple(f"{beginning}.{module}" for module in modules) for name, modules in found.items()}
