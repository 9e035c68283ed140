"""Loads a draft head's weights onto the target model's device."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.errors import ModelError
from mmengine.models.plugin import VisionLanguageModel
from mmengine.models.reader import WeightReader, open_reader
from mmengine.native import library as native
from mmengine.native.decoder_weights import LayerWeights, fits
from mmengine.native.feed_forward import Dense
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.eagle3.head import DraftHead, HeadLayer, HeadWeights
from mmengine.runtime.drafting.eagle3.native_head import NativeDraftHead
from mmengine.runtime.drafting.head.linears import Linear, gated, linear_of, scores_of
from mmengine.spec_decode.eagle3.config import HeadConfig
from mmengine.spec_decode.eagle3.loading import HeadFolder
from mmengine.spec_decode.eagle3.tensors import EMBEDDING, FC, FC_BIAS, HEAD, INPUT_NORM, NORM, QKV, fc_norm

# The head's and the target's embeddings are compared in parts of this many rows, to save memory.
_COMPARED_ROWS = 4096


def load_head(folder: HeadFolder, model: VisionLanguageModel, placement: Placement) -> DraftHead:
    """Load the draft head from a checked folder. `model`: the target model.

    The weights are converted to `placement`'s dtype. Raises ModelError if the head cannot be read or
    does not fit into memory.
    """
    device = placement.device.torch_device
    try:
        with torch.inference_mode(), open_reader(folder.entries, device, placement.dtype) as weights:
            parts = _read(folder, weights, model, device)
            library = native.load() if fits(folder.config.head_dim, device, placement.dtype) else None
            if library is None:
                return DraftHead(folder.config, parts, placement)
            return NativeDraftHead(folder.config, parts, placement, library)
    except torch.OutOfMemoryError:
        raise ModelError(f"the draft head does not fit into the memory of {placement.device.name}") from None


def _read(
    folder: HeadFolder, weights: WeightReader, model: VisionLanguageModel, device: torch.device
) -> HeadWeights:
    config, ids = folder.config, folder.target_ids
    embedding = _embedding(config, weights, model, device)
    fc_norms = [INPUT_NORM] if config.norm_before_fc else []
    if config.fc_norm:
        fc_norms = [fc_norm(aux_layer) for aux_layer in range(len(config.aux_layers))]
    scores: Linear = model.logits
    packed = None
    if config.head != "target":
        scores, packed = scores_of(weights.read(HEAD if config.head == "own" else EMBEDDING))
    return HeadWeights(
        fc=linear_of(weights.read(FC), weights.read(FC_BIAS) if FC_BIAS in weights else None),
        fc_norms=tuple(weights.read(name) for name in fc_norms),
        hidden_norm=weights.read("layers.0.hidden_norm.weight"),
        layers=[_layer(config, weights, index) for index in range(config.num_layers)],
        norm=weights.read(NORM),
        scores=scores,
        packed_scores=packed,
        embed=model.embed if embedding is None else lambda input_ids: F.embedding(input_ids, embedding),
        target_ids=None if ids is None else torch.from_numpy(ids).to(device),
    )


def _embedding(
    config: HeadConfig, weights: WeightReader, model: VisionLanguageModel, device: torch.device
) -> Tensor | None:
    """Return the head's own embedding, or None if it is missing or equals the target's embedding."""
    if not config.own_embedding:
        return None
    own = weights.read(EMBEDDING)
    if config.embed_size != config.target_hidden_size:
        return own
    for start in range(0, config.vocab_size, _COMPARED_ROWS):
        stop = min(start + _COMPARED_ROWS, config.vocab_size)
        if not torch.equal(own[start:stop], model.embed(torch.arange(start, stop, device=device))):
            return own
    return None


def _layer(config: HeadConfig, weights: WeightReader, index: int) -> HeadLayer:
    prefix = f"layers.{index}."

    def read(*names: str) -> Tensor:
        return weights.read(*(f"{prefix}{name}" for name in names))

    def stored(name: str) -> bool:
        return f"{prefix}{name}" in weights

    fused = stored("self_attn.qkv_proj.weight")
    projections = ("self_attn.qkv_proj",) if fused else tuple(f"self_attn.{name}" for name in QKV)
    wide = ("mlp.gate_up_proj",) if stored("mlp.gate_up_proj.weight") else ("mlp.gate_proj", "mlp.up_proj")
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = read("self_attn.q_norm.weight"), read("self_attn.k_norm.weight")
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    out_bias = read("self_attn.o_proj.bias") if stored("self_attn.o_proj.bias") else None
    return LayerWeights(
        input_norm=read("input_layernorm.weight"),
        qkv=linear_of(_weights(read, projections), _biases(read, projections, config.attention_bias)),
        qk_norm=qk_norm,
        out=linear_of(read("self_attn.o_proj.weight"), out_bias),
        post_norm=read("post_attention_layernorm.weight"),
        feed_forward=Dense(gated(_weights(read, wide)), linear_of(read("mlp.down_proj.weight"))),
    )


def _weights(read: Callable[..., Tensor], names: tuple[str, ...]) -> Tensor:
    return read(*(f"{name}.weight" for name in names))


def _biases(read: Callable[..., Tensor], names: tuple[str, ...], biased: bool) -> Tensor | None:
    return read(*(f"{name}.bias" for name in names)) if biased else None
