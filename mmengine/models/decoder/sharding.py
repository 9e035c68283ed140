"""Splits a text decoder over ranks (tensor parallelism). The ranks divide the attention heads, and the
intermediate values of each MLP and expert. All ranks have the norms, the routers and the embedding. Only rank
0 has the LM head and the vision tower.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import replace

from mmengine.errors import ConfigError, ModelError
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.tensors import SHARED, expert_name, layer_name
from mmengine.models.sharding import COLUMNS, ROWS, Shard

ATTENTION = {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS}
SWIGLU = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}
_CUT = re.compile(rf"text\.layers\.\d+\.(?:self_attn|mlp|mlp\.experts\.\d+|{re.escape(SHARED)})")


def axis_of(name: str) -> int | None:
    """Return the dimension along which a tensor is cut, or None if each rank gets the whole tensor.

    If a weight is cut by its inputs (ROWS), its bias stays whole, and only rank 0 adds the bias.
    """
    module, _, kind = name.rpartition(".")
    whole, _, part = module.rpartition(".")
    axis = (ATTENTION if whole.endswith(".self_attn") else SWIGLU).get(part)
    if axis is None or not _CUT.fullmatch(whole):
        return None
    return axis if kind == "weight" or axis == COLUMNS else None


def cut_config(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """Return the sizes for one rank's part of the decoder. Raises ConfigError if the heads or the
    intermediate values cannot be divided by the number of ranks.
    """
    if config.delta is not None or config.gated:
        raise ConfigError("layers with recurrent states cannot be cut over ranks; use tensor_parallel 1")
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=shard.part_of(experts.intermediate_size, "intermediate values of an expert"),
            shared_size=shard.part_of(experts.shared_size, "intermediate values of the shared expert"),
        )
    return replace(
        config,
        experts=experts,
        num_kv_heads=shard.part_of(config.num_kv_heads, "KV heads"),
        num_heads=shard.part_of(config.num_heads, "heads"),
        intermediate_size=shard.part_of(config.intermediate_size, "intermediate values of an MLP"),
    )


def check_plan(config: DecoderConfig, names: Container[str]) -> None:
    """Raise ModelError if a weight that must be cut is missing in `names`. Without this check, a weight with
    an unexpected name would silently stay whole.
    """
    for layer in range(config.num_layers):
        for module in _cut_modules(config, layer):
            name = f"{layer_name(layer)}.{module}.weight"
            if name not in names or axis_of(name) is None:
                raise ModelError(f"the weights hold no {name} to cut over ranks; use tensor_parallel 1")


def _cut_modules(config: DecoderConfig, layer: int) -> Iterator[str]:
    yield from (f"self_attn.{name}" for name in ATTENTION)
    experts, wholes = config.experts_of(layer), ["mlp"]
    if experts is not None:
        wholes = [*map(expert_name, range(experts.count)), *([SHARED] if experts.shared_size else [])]
    yield from (f"{whole}.{name}" for whole in wholes for name in SWIGLU)
