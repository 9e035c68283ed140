"""Reads a decoder layer's weights. The native decoder and the torch decoder pass Makers: the functions that
make their matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig, ExpertsConfig
from mmengine.models.decoder.tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    ROUTER,
    SHARED,
    SHARED_GATE,
    expert_name,
    layer_name,
)
from mmengine.models.reader import WeightReader
from mmengine.native.decoder_weights import DeltaWeights, LayerWeights
from mmengine.native.feed_forward import Dense, Mixture

L = TypeVar("L")
E = TypeVar("E")
Names = Sequence[str]  # Names of weights [out, in] that are joined along the first dimension.
Make = Callable[[Names, Tensor | None], L]  # Takes weight names and a bias.
MakeExperts = Callable[[Sequence[Names]], E]  # Takes weight names for each expert.


@dataclass(frozen=True, slots=True)
class Makers(Generic[L, E]):
    """Functions that make a decoder's linear layers from weight names.

    `exact`: for matrices that must not be quantised. `gated`: for the joined q, k and v in a decoder with
    output gates. `gated` reorders the rows by `gates_behind`.
    """

    linear: Make[L]
    gate_up: Make[L]
    exact: Make[L]
    experts_gate_up: MakeExperts[E]
    experts_down: MakeExperts[E]
    gated: Make[L]


def read_layer(
    config: DecoderConfig,
    weights: WeightReader,
    index: int,
    makers: Makers[L, E],
    *,
    adds_bias: bool = True,
) -> LayerWeights[L, Dense[L] | Mixture[L, E]]:
    """Return a layer's weights. `adds_bias`: whether this rank adds the biases of row-parallel layers."""

    def read(*names: str) -> Tensor:
        return weights.read(*(f"{layer_name(index)}.{name}" for name in names))

    def linear(*names: str, biased: bool, make: Make[L] = makers.linear) -> L:
        bias = read(*(f"{name}.bias" for name in names)) if biased else None
        return make([f"{layer_name(index)}.{name}.weight" for name in names], bias)

    def norm(name: str) -> Tensor:
        return read_norm(config, weights, f"{layer_name(index)}.{name}.weight")

    after: Dense[L] | Mixture[L, E]
    if (experts := config.experts_of(index)) is not None:
        after = _mixture(experts, layer_name(index), makers)
    else:
        after = Dense(
            linear("mlp.gate_proj", "mlp.up_proj", biased=config.mlp_bias, make=makers.gate_up),
            linear("mlp.down_proj", biased=config.mlp_bias and adds_bias),
        )
    if config.is_delta(index):
        return LayerWeights(
            norm("input_layernorm"),
            linear("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", biased=False),
            None,
            linear("linear_attn.out_proj", biased=False),
            norm("post_attention_layernorm"),
            after,
            _read_delta(read, linear, makers.exact),
        )
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    input_norm = norm("input_layernorm")
    qkv = linear(*projections, biased=config.qkv_bias, make=makers.gated if config.gated else makers.linear)
    post_norm = norm("post_attention_layernorm")
    out = linear("self_attn.o_proj", biased=config.out_bias and adds_bias)
    return LayerWeights(input_norm, qkv, qk_norm, out, post_norm, after)


def _read_delta(read: Callable[..., Tensor], linear: Callable[..., L], exact: Make[L]) -> DeltaWeights[L]:
    """Return a delta net's weights. As in transformers, A_log has the model's dtype, and the decay is
    computed in float32.
    """
    return DeltaWeights(
        ba=linear("linear_attn.in_proj_b", "linear_attn.in_proj_a", biased=False, make=exact),
        conv=read("linear_attn.conv1d.weight").flatten(1).t().contiguous(),
        decay=-read("linear_attn.A_log").float().exp(),
        dt_bias=read("linear_attn.dt_bias").float(),
        norm=read("linear_attn.norm.weight"),
    )


def gates_behind(config: DecoderConfig) -> Tensor:
    """Return row indices, int64 [rows], that reorder the joined q, k and v so that all gates come last.
    Checkpoints store a gate after each head of q.
    """
    heads, size = config.num_heads, config.head_dim
    q = torch.arange(2 * heads * size).view(heads, 2, size)
    kv = torch.arange(2 * heads * size, 2 * (heads + config.num_kv_heads) * size)
    return torch.cat((q[:, 0].flatten(), kv, q[:, 1].flatten()))


def read_norm(config: DecoderConfig, weights: WeightReader, name: str = NORM) -> Tensor:
    """Return the factors of a norm, by default the final norm."""
    weight = weights.read(name)
    return 1 + weight.float() if config.norm_offset else weight


def _mixture(experts: ExpertsConfig, layer: str, makers: Makers[L, E]) -> Mixture[L, E]:
    wholes = [f"{layer}.{expert_name(i)}" for i in range(experts.count)]
    shared, shared_gate = None, None
    if experts.shared_size:
        shared = Dense(
            makers.gate_up(_gate_up(f"{layer}.{SHARED}"), None),
            makers.linear([f"{layer}.{SHARED}.down_proj.weight"], None),
        )
        shared_gate = makers.exact([f"{layer}.{SHARED_GATE}.weight"], None)
    return Mixture(
        router=makers.exact([f"{layer}.{ROUTER}.weight"], None),
        gate_up=makers.experts_gate_up([_gate_up(whole) for whole in wholes]),
        down=makers.experts_down([[f"{whole}.down_proj.weight"] for whole in wholes]),
        shared=shared,
        shared_gate=shared_gate,
        top_k=experts.top_k,
        norm_top_k=experts.norm_top_k,
    )


def _gate_up(whole: str) -> list[str]:
    return [f"{whole}.gate_proj.weight", f"{whole}.up_proj.weight"]


def is_tied(config: DecoderConfig, weights: WeightReader) -> bool:
    """Return whether the LM head uses the embedding's matrix. As in transformers, a stored head that differs
    from the embedding is used even if tie_word_embeddings is set.
    """
    return HEAD not in weights or (config.tied and weights.same(HEAD, EMBEDDING))
