"""The text decoder on a CPU, through compiled kernels: the numbers of text.py in one call for all layers.

Weights are packed one tensor at a time while they are read; what stays in memory is the packed form.
"""

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.layers import Makers, is_tied, read_layer
from mmengine.models.decoder.rotary import Rotary
from mmengine.models.decoder.tensors import EMBEDDING, HEAD, NORM
from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.reader import WeightReader
from mmengine.models.step_progress import tell
from mmengine.native.decoder import Decoder
from mmengine.native.decoder_weights import LayerWeights, NativeLayer, Sizes
from mmengine.native.experts import Experts, PackedExperts
from mmengine.native.feed_forward import Dense, Mixture
from mmengine.native.linear import PackedLinear
from mmengine.native.rotary import RotaryTable


class NativeTextDecoder:
    """See TextDecoder. Serves one step at a time. `experts`: of the layers that have some."""

    batch_invariant = True

    def __init__(self, config: DecoderConfig, weights: WeightReader, library: ctypes.CDLL) -> None:
        def pack(names: Sequence[str], bias: Tensor | None = None, *, gate_up: bool = False) -> PackedLinear:
            return PackedLinear(library, weights.held(*names), bias, gate_up=gate_up)

        def exact(names: Sequence[str], bias: Tensor | None) -> PackedLinear:
            return PackedLinear(library, weights.pieces(*names), bias)

        def experts(groups: Sequence[Sequence[str]], *, gate_up: bool = False) -> PackedExperts:
            return PackedExperts(library, weights.held_each(groups), gate_up=gate_up)

        makers = Makers(pack, partial(pack, gate_up=True), exact, partial(experts, gate_up=True), experts)
        layers = [
            _in_kernels(library, read_layer(config, weights, i, makers)) for i in range(config.num_layers)
        ]
        self.experts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
        norm = weights.read(NORM)
        # The matrix is not kept twice: a tied embedding is read back out of the packed head.
        tied = is_tied(config, weights)
        self._head = pack([EMBEDDING if tied else HEAD])
        self._embedding = None if tied else weights.read(EMBEDDING)
        sizes = Sizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        self._decoder = Decoder(library, sizes, norm.dtype, layers, norm)
        rotary = Rotary(config.rope, config.head_dim, torch.device("cpu"))
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
        tell()  # what was encoded for the step is; the layers are one call
        aux_rows = None if aux_hidden_states is None else (aux_hidden_states.layers, aux_hidden_states.rows)
        return self._decoder.forward(embeds, deepstack, cos, sin, attention, aux_rows)


def _in_kernels(
    library: ctypes.CDLL,
    layer: LayerWeights[PackedLinear, Dense[PackedLinear] | Mixture[PackedLinear, PackedExperts]],
) -> NativeLayer:
    after = layer.feed_forward
    feed_forward = after if isinstance(after, Dense) else Experts(library, after)
    return LayerWeights(layer.input_norm, layer.qkv, layer.qk_norm, layer.out, layer.post_norm, feed_forward)
