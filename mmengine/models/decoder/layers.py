"""The weights of a decoder's layers, read in the order of their names, for whoever multiplies with them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.tensors import EMBEDDING, HEAD, layer_name
from mmengine.models.reader import WeightReader
from mmengine.native.decoder_weights import LayerWeights

L = TypeVar("L")
Make = Callable[[Sequence[str], Tensor | None], L]  # of the names of weights to join, [out, in], and a bias


def read_layer(
    config: DecoderConfig,
    weights: WeightReader,
    index: int,
    make: Make[L],
    make_gate_up: Make[L],
    *,
    adds_bias: bool = True,
) -> LayerWeights[L]:
    """`adds_bias`: whether this rank adds the biases of which there is one for all ranks' sum."""

    def read(*names: str) -> Tensor:
        return weights.read(*(f"{layer_name(index)}.{name}" for name in names))

    def linear(*names: str, biased: bool, make: Make[L] = make) -> L:
        bias = read(*(f"{name}.bias" for name in names)) if biased else None
        return make([f"{layer_name(index)}.{name}.weight" for name in names], bias)

    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return LayerWeights(
        input_norm=read("input_layernorm.weight"),
        qkv=linear(*projections, biased=config.qkv_bias),
        qk_norm=qk_norm,
        post_norm=read("post_attention_layernorm.weight"),
        out=linear("self_attn.o_proj", biased=config.out_bias and adds_bias),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", biased=config.mlp_bias, make=make_gate_up),
        down=linear("mlp.down_proj", biased=config.mlp_bias and adds_bias),
    )


def is_tied(config: DecoderConfig, weights: WeightReader) -> bool:
    """Whether the head is the embedding. One stored beside a tied config counts only when it differs, as in
    transformers."""
    return HEAD not in weights or (config.tied and weights.same(HEAD, EMBEDDING))
