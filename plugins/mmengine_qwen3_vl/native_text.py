"""The text decoder on a CPU, through compiled kernels: the numbers of text.py in one call for all layers.

Weights are packed one tensor at a time while they are read; what stays in memory is the packed form.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.reader import WeightReader
from mmengine.native.decoder import Decoder
from mmengine.native.decoder_weights import MAX_HEAD_DIM, LayerWeights, Sizes
from mmengine.native.dtypes import DTYPES
from mmengine.native.linear import PackedLinear
from mmengine.native.rotary import RotaryTable
from mmengine_qwen3_vl.config import TextConfig
from mmengine_qwen3_vl.loading import HEAD
from mmengine_qwen3_vl.text import Rotary


def fits(config: TextConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compute this decoder."""
    heads_fit = config.head_dim % 8 == 0 and config.head_dim <= MAX_HEAD_DIM
    return device.type == "cpu" and dtype in DTYPES and heads_fit


class NativeTextDecoder:
    """See TextDecoder. Serves one step at a time."""

    batch_invariant = True

    def __init__(self, config: TextConfig, weights: WeightReader, library: ctypes.CDLL) -> None:
        layers = [_read_layer(config, weights, library, i) for i in range(config.num_layers)]
        norm = weights.read("text.norm.weight")
        embedding = weights.read("text.embed_tokens.weight")
        tied = HEAD not in weights or (config.tied and weights.same(HEAD, "text.embed_tokens.weight"))
        # The matrix is not kept twice: a tied embedding is read back out of the packed head.
        self._head = PackedLinear(library, embedding if tied else weights.read(HEAD))
        self._embedding = None if tied else embedding
        sizes = Sizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        self._decoder = Decoder(library, sizes, norm.dtype, layers, norm)
        rotary = Rotary(config, torch.device("cpu"))
        self._rotary = RotaryTable(library, rotary.axis, rotary.halves, norm.dtype)

    def embed(self, input_ids: Tensor) -> Tensor:
        """int64 [t] to [t, hidden]."""
        if self._embedding is not None:
            return F.embedding(input_ids, self._embedding)
        return self._head.rows(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden states [s, hidden] to float32 [s, vocab]."""
        return self._head(hidden, float32=True)

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """embeds [t, hidden], deepstack [n, t, hidden] (zero at text) or None, positions int64 [3, t]
        to normed hidden states [t, hidden]. Fills the rows of `aux_hidden_states`."""
        cos, sin = self._rotary.rows(positions)
        aux_rows = None if aux_hidden_states is None else (aux_hidden_states.layers, aux_hidden_states.rows)
        return self._decoder.forward(embeds, deepstack, cos, sin, attention, aux_rows)


def _read_layer(config: TextConfig, weights: WeightReader, library: ctypes.CDLL, index: int) -> LayerWeights:
    def read(*names: str) -> Tensor:
        return weights.read(*(f"text.layers.{index}.{name}" for name in names))

    def pack(*names: str, biased: bool = False) -> PackedLinear:
        bias = read(*(f"{name}.bias" for name in names)) if biased else None
        return PackedLinear(library, read(*(f"{name}.weight" for name in names)), bias)

    projections = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    return LayerWeights(
        input_norm=read("input_layernorm.weight"),
        q_norm=read("self_attn.q_norm.weight"),
        k_norm=read("self_attn.k_norm.weight"),
        post_norm=read("post_attention_layernorm.weight"),
        qkv=pack(*projections, biased=config.attention_bias),
        out=pack("self_attn.o_proj", biased=config.attention_bias),
        gate_up=PackedLinear(library, read("mlp.gate_proj.weight", "mlp.up_proj.weight"), gate_up=True),
        down=pack("mlp.down_proj"),
    )
