"""The weights of a decoder's layers, read in the order of their names, for whoever multiplies with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig, ExpertsConfig
from mmengine.models.decoder.tensors import (
    EMBEDDING,
    HEAD,
    ROUTER,
    SHARED,
    SHARED_GATE,
    expert_name,
    layer_name,
)
from mmengine.models.reader import WeightReader
from mmengine.native.decoder_weights import LayerWeights
from mmengine.native.feed_forward import Dense, Mixture

L = TypeVar("L")
E = TypeVar("E")
Names = Sequence[str]  # of weights [out, in] to join
Make = Callable[[Names, Tensor | None], L]  # with a bias
MakeExperts = Callable[[Sequence[Names]], E]  # of the weights of each expert


@dataclass(frozen=True, slots=True)
class Makers(Generic[L, E]):
    """Who makes what multiplies out of names. `exact`: of matrices that stay what they are stored as."""

    linear: Make[L]
    gate_up: Make[L]
    exact: Make[L]
    experts_gate_up: MakeExperts[E]
    experts_down: MakeExperts[E]


def read_layer(
    config: DecoderConfig,
    weights: WeightReader,
    index: int,
    makers: Makers[L, E],
    *,
    adds_bias: bool = True,
) -> LayerWeights[L, Dense[L] | Mixture[L, E]]:
    """`adds_bias`: whether this rank adds the biases of which there is one for all ranks' sum."""

    def read(*names: str) -> Tensor:
        return weights.read(*(f"{layer_name(index)}.{name}" for name in names))

    def linear(*names: str, biased: bool, make: Make[L] = makers.linear) -> L:
        bias = read(*(f"{name}.bias" for name in names)) if biased else None
        return make([f"{layer_name(index)}.{name}.weight" for name in names], bias)

    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    input_norm = read("input_layernorm.weight")
    qkv = linear(*projections, biased=config.qkv_bias)
    post_norm = read("post_attention_layernorm.weight")
    out = linear("self_attn.o_proj", biased=config.out_bias and adds_bias)
    feed_forward: Dense[L] | Mixture[L, E]
    if (experts := config.experts_of(index)) is not None:
        feed_forward = _mixture(experts, layer_name(index), makers)
    else:
        feed_forward = Dense(
            linear("mlp.gate_proj", "mlp.up_proj", biased=config.mlp_bias, make=makers.gate_up),
            linear("mlp.down_proj", biased=config.mlp_bias and adds_bias),
        )
    return LayerWeights(input_norm, qkv, qk_norm, out, post_norm, feed_forward)


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
    """Whether the head is the embedding. One stored beside a tied config counts only when it differs, as in
    transformers."""
    return HEAD not in weights or (config.tied and weights.same(HEAD, EMBEDDING))
