"""How a text decoder is cut over ranks. What PLAN does not name is whole on each rank that
has it: norms and the embedding everywhere, the head and the vision tower on rank 0."""

from collections.abc import Container
from dataclasses import replace

from mmengine.errors import ModelError
from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.tensors import layer_name
from mmengine.models.sharding import COLUMNS, ROWS, Shard

PLAN = {
    "self_attn.q_proj": COLUMNS,
    "self_attn.k_proj": COLUMNS,
    "self_attn.v_proj": COLUMNS,
    "self_attn.o_proj": ROWS,
    "mlp.gate_proj": COLUMNS,
    "mlp.up_proj": COLUMNS,
    "mlp.down_proj": ROWS,
}


def axis_of(name: str) -> int | None:
    """The dimension along which a tensor is cut; None: it is whole. A bias has one entry an output, so
    behind a weight cut by rows it is whole, and added by one rank."""
    layer, _, kind = name.rpartition(".")
    place = layer.split(".", 3)  # text, layers, its number, the module
    if len(place) < 4 or place[:2] != ["text", "layers"] or place[3] not in PLAN:
        return None
    axis = PLAN[place[3]]
    return axis if kind == "weight" or axis == COLUMNS else None


def cut_config(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """The decoder of one rank. Raises ConfigError where heads or the MLP's middle cannot be cut."""
    return replace(
        config,
        num_kv_heads=shard.part_of(config.num_kv_heads, "KV heads"),
        num_heads=shard.part_of(config.num_heads, "heads"),
        intermediate_size=shard.part_of(config.intermediate_size, "values of an MLP's middle"),
    )


def check_plan(config: DecoderConfig, names: Container[str]) -> None:
    """Raise ModelError where a part of the plan names nothing, and each rank would hold that whole."""
    for layer in range(config.num_layers):
        for module in PLAN:
            name = f"{layer_name(layer)}.{module}.weight"
            if name not in names or axis_of(name) is None:
                raise ModelError(f"the weights hold no {name} to cut over ranks; use tensor_parallel 1")
