"""The network of an EAGLE-3 draft head (arXiv 2503.01840). Supports EAGLE 3.1's flags in the head's
config.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmengine.models.decoder.operations import norm_and_rotate, rms_norm_of
from mmengine.models.decoder.rotary import Rotary
from mmengine.models.plugin import AttentionPort
from mmengine.native.decoder_weights import LayerWeights
from mmengine.native.feed_forward import Dense
from mmengine.native.linear import PackedLinear
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.head.linears import Linear
from mmengine.runtime.drafting.head.network import HeadNetwork
from mmengine.spec_decode.eagle3.config import HeadConfig

HeadLayer = LayerWeights[Linear, Dense[Linear]]


@dataclass(slots=True)
class HeadWeights:
    """A draft head's weights; h is the hidden size.

    `fc_norms`: empty, one norm for the concatenated auxiliary states, or one norm for each auxiliary layer.
    `layers`: the first layer reads embeddings and hidden states, so its `qkv` takes embed_size + h values.
    This layer's `input_norm` normalises the embeddings, and `hidden_norm` the hidden states. `target_ids`:
    int64 [draft_vocab_size], each draft token's id in the target's vocabulary, or None for equal
    vocabularies.
    """

    fc: Linear
    fc_norms: tuple[Tensor, ...]
    hidden_norm: Tensor  # [h]
    layers: list[HeadLayer]
    norm: Tensor  # [h]
    scores: Linear  # maps h values to scores, float32 [draft_vocab_size]
    packed_scores: PackedLinear | None  # the packed matrix of `scores`, if there is one
    embed: Callable[[Tensor], Tensor]  # maps token ids, int64 [t], to embeddings [t, embed_size]
    target_ids: Tensor | None


class DraftHead(HeadNetwork):
    """The network of an EAGLE-3 head, without state between calls."""

    name = "eagle3"
    config: HeadConfig

    def __init__(self, config: HeadConfig, weights: HeadWeights, placement: Placement) -> None:
        super().__init__(placement)
        self.config = config
        self._weights = weights
        self._rotary = Rotary(config.rope, config.head_dim, self.device)
        self._rms_norm = rms_norm_of(self.dtype)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """Convert the target's states [t, aux_layers * target_hidden_size] to [t, h], an input of
        `forward`.
        """
        norms, eps = self._weights.fc_norms, self.config.rms_norm_eps
        if len(norms) == 1:
            aux_hidden_states = self._rms_norm(aux_hidden_states, norms[0], eps)
        elif norms:
            parts = aux_hidden_states.chunk(len(norms), -1)
            aux_hidden_states = torch.cat(
                [self._rms_norm(x, w, eps) for x, w in zip(parts, norms, strict=True)], -1
            )
        return self._weights.fc(aux_hidden_states)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, embed_size] for target token ids, int64 [t].

        A head without its own embedding uses the target model's embedding.
        """
        return self._weights.embed(input_ids)

    def forward(
        self,
        hidden: Tensor,
        next_embeds: Tensor,
        positions: Tensor,
        attention: AttentionPort,
        first_layer: int,
    ) -> tuple[Tensor, Tensor]:
        c, eps = self.config, self.config.rms_norm_eps
        cos, sin = self._rotary.rows(positions, hidden.dtype)
        stream = hidden
        for index, layer in enumerate(self._weights.layers):
            if index:
                residual, inputs = stream, self._rms_norm(stream, layer.input_norm, eps)
            else:
                normed = self._rms_norm(stream, self._weights.hidden_norm, eps)
                residual = normed if c.norm_before_residual else stream
                inputs = torch.cat((self._rms_norm(next_embeds, layer.input_norm, eps), normed), -1)
            stream = residual + self._attend(first_layer + index, layer, inputs, cos, sin, attention)
            wide = layer.feed_forward.gate_up(self._rms_norm(stream, layer.post_norm, eps))
            stream = stream + layer.feed_forward.down(wide)
        z = self._rms_norm(stream, self._weights.norm, eps)
        return z, (z if c.norm_output else stream)

    def _attend(
        self,
        number: int,
        layer: HeadLayer,
        inputs: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionPort,
    ) -> Tensor:
        c = self.config
        qkv = layer.qkv(inputs).view(len(inputs), -1, c.head_dim)
        num_qk = c.num_heads + c.num_kv_heads
        qk = norm_and_rotate(qkv[:, :num_qk], layer.qk_norm, cos, sin, c.rms_norm_eps)
        attention.append(number, qk[:, c.num_heads :], qkv[:, num_qk:])
        mixed = attention.run(number, qk[:, : c.num_heads])
        return layer.out(mixed.reshape(len(inputs), -1))

    def logits(self, z: Tensor) -> Tensor:
        """Return the logits, float32 [s, draft_vocab_size]. `z` [s, h]: rows from the tensor `z` that
        `forward` returns.
        """
        return self._weights.scores(z)

    def tokens(self, logits: Tensor) -> Tensor:
        """Return each row's likeliest token, as a target token id, int64 [s]."""
        best = logits.argmax(-1)
        ids = self._weights.target_ids
        return best if ids is None else ids[best]
