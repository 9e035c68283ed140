"""The text decoder in torch, for a ragged batch: t concatenated tokens from several rows.

Only attention and delta nets mix tokens; the attention port and the states know the rows' boundaries. A small
model's decode step spends most of its time on launching operations. Therefore q, k and v are one matmul, gate
and up are another, and the norms and the rotation process q and k together.
"""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.delta import DeltaMixer
from mmengine.models.decoder.experts import Gate, TorchLayer, feed_forward, silu_mul
from mmengine.models.decoder.layers import Makers, gates_behind, is_tied, read_layer, read_norm
from mmengine.models.decoder.lora_parts import decoder_parts
from mmengine.models.decoder.operations import norm_and_rotate, rms_norm_of
from mmengine.models.decoder.prepacked import Linear, MakeLinear, linear_of
from mmengine.models.decoder.rotary import Rotary
from mmengine.models.decoder.tensors import EMBEDDING, HEAD
from mmengine.models.lora.adapter import AdapterRows
from mmengine.models.lora.tensors import AdapterTensors
from mmengine.models.lora.torch_linear import AddedRows, rows_on, with_rows
from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.progress import report_step
from mmengine.models.reader import WeightReader
from mmengine.models.sharding import Shard
from mmengine.models.states import StepStates
from mmengine.native.feed_forward import Dense
from mmengine.native.lora import DECODER_LINEARS, LoraPart


class TextDecoder:
    """Embedding, layers, final norm and LM head. Keeps no state between calls. With a `shard`, `config` has
    the sizes of this rank's shard, and only rank 0 has the LM head. With `has_vocabulary` false there is
    neither embedding nor LM head.
    """

    batch_invariant = False  # torch selects the matmul algorithm by the number of rows.

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightReader,
        device: torch.device,
        shard: Shard | None = None,
        make_linear: MakeLinear = linear_of,
        gate: Gate = silu_mul,
        has_vocabulary: bool = True,
    ) -> None:
        self.config, self._device = config, device
        leads = shard is None or shard.leads
        self._sum = shard.all_reduce if shard is not None else _unsplit

        def make(names: Sequence[str], bias: Tensor | None) -> Linear:
            return make_linear(weights.read(*names), bias)

        def gated(names: Sequence[str], bias: Tensor | None) -> Linear:
            order = gates_behind(config).to(device)
            return make_linear(weights.read(*names)[order], None if bias is None else bias[order])

        makers = Makers(make, make, make, weights.read_each, weights.read_each, gated)
        self._layers = [
            read_layer(config, weights, i, makers, adds_bias=leads) for i in range(config.num_layers)
        ]
        self._gate = gate
        self._feed_forwards = [feed_forward(layer.feed_forward, gate) for layer in self._layers]
        self._norm = read_norm(config, weights)
        self._embedding = weights.read(EMBEDDING) if has_vocabulary else None
        self._rotary = Rotary(config.rope, config.rotated, device)
        self._rms_norm = rms_norm_of(weights.dtype, once=config.norm_offset)
        self._places = attention_places(config)
        self._deltas = {
            index: DeltaMixer(config.delta, layer.delta, config.rms_norm_eps, index - self._places[index])
            for index, layer in enumerate(self._layers)
            if config.delta is not None and layer.delta is not None
        }
        self._head: Linear | None = None
        if leads and self._embedding is not None:
            head = self._embedding if is_tied(config, weights) else weights.read(HEAD)
            self._head = make_linear(head, None)

    def adapter(self, tensors: AdapterTensors) -> list[tuple[LoraPart, ...]]:
        """Return the adapter's additions to this decoder's linear layers, for LoadedAdapter.text."""
        return list(decoder_parts(self.config, tensors))

    def _adapted(self, adapters: Sequence[AdapterRows]) -> Self:
        """Return a copy for a step. Its linear layers add each adapter's product to the adapter's rows."""
        own = []
        for adapter, rows in adapters:
            assert isinstance(adapter.text, list), "an adapter that another decoder made"
            own.append((adapter.text, rows_on(rows, self._device)))
        other = copy(self)
        added = [
            [AddedRows(rows, parts[place]) for parts, rows in own if parts[place]]
            for place in range(len(DECODER_LINEARS) * len(self._layers))
        ]
        each = len(DECODER_LINEARS)
        other._layers = [
            _with_added(layer, added[each * i : each * (i + 1)]) for i, layer in enumerate(self._layers)
        ]
        other._feed_forwards = [feed_forward(layer.feed_forward, self._gate) for layer in other._layers]
        return other

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, hidden] for token ids int64 [t]."""
        assert self._embedding is not None
        return F.embedding(input_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [s, vocab], for normed hidden states [s, hidden]. Only for rank 0."""
        assert self._head is not None
        return self._head(hidden).float()

    def forward(
        self,
        embeds: Tensor,
        deepstack: Tensor | None,
        positions: Tensor,
        attention: AttentionPort,
        aux_hidden_states: AuxHiddenStates | None = None,
        states: StepStates | None = None,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Compute all layers and return the normed hidden states [t, hidden].

        `embeds`: [t, hidden]. `deepstack`: [n, t, hidden], zero at text tokens, or None. `positions`: int64
        [3, t]. The attention port gets q, k and v as views that are not contiguous. Fills
        `aux_hidden_states.rows` and updates `states`. Each adapter's products are added for the adapter's
        tokens.
        """
        if adapters:
            own = self._adapted(adapters)
            return own.forward(embeds, deepstack, positions, attention, aux_hidden_states, states)
        cos, sin = self._rotary.rows(positions, embeds.dtype)
        eps = self.config.rms_norm_eps
        hidden = embeds
        for index, layer in enumerate(self._layers):
            if aux_hidden_states is not None:
                aux_layer(aux_hidden_states, index, hidden)
            normed = self._rms_norm(hidden, layer.input_norm, eps)
            if index in self._deltas:
                mixed = self._deltas[index].mix(layer.qkv(normed), normed, states)
                hidden = hidden + layer.out(mixed)
            else:
                hidden = hidden + self._attend(index, layer, normed, cos, sin, attention)
            normed = self._rms_norm(hidden, layer.post_norm, eps)
            hidden = hidden + self._sum(self._feed_forwards[index](normed))
            if deepstack is not None and index < len(deepstack):
                hidden = hidden + deepstack[index]
            report_step()
        if aux_hidden_states is not None:
            aux_layer(aux_hidden_states, len(self._layers), hidden)
        return self._rms_norm(hidden, self._norm, eps)

    def _attend(
        self,
        index: int,
        layer: TorchLayer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionPort,
    ) -> Tensor:
        c = self.config
        qkv = layer.qkv(normed).view(len(normed), -1, c.head_dim)
        num_qk, place = c.num_heads + c.num_kv_heads, self._places[index]
        qk = norm_and_rotate(qkv[:, :num_qk], layer.qk_norm, cos, sin, c.rms_norm_eps, once=c.norm_offset)
        attention.append(place, qk[:, c.num_heads :], qkv[:, num_qk : num_qk + c.num_kv_heads])
        mixed = attention.run(place, qk[:, : c.num_heads])
        if c.gated:
            mixed = mixed * qkv[:, num_qk + c.num_kv_heads :].sigmoid()
        return self._sum(layer.out(mixed.reshape(len(normed), -1)))


def _with_added(layer: TorchLayer, added: Sequence[Sequence[AddedRows]]) -> TorchLayer:
    """Return the layer with additions to its linear layers. `added`: in the order of DECODER_LINEARS."""
    qkv, out, gate_up, down = added
    after = layer.feed_forward
    if isinstance(after, Dense):
        after = Dense(with_rows(after.gate_up, gate_up), with_rows(after.down, down))
    return layer._replace(qkv=with_rows(layer.qkv, qkv), out=with_rows(layer.out, out), feed_forward=after)


def attention_places(config: DecoderConfig) -> list[int]:
    """Return, for each layer, how many attention layers precede it."""
    return list(accumulate((not config.is_delta(index) for index in range(config.num_layers)), initial=0))


def aux_layer(aux_hidden_states: AuxHiddenStates, layer: int, hidden: Tensor) -> None:
    for place, aux_rows in enumerate(aux_hidden_states.layers):
        if aux_rows == layer:
            aux_hidden_states.rows[:, place * hidden.shape[1] :][:, : hidden.shape[1]] = hidden


def _unsplit(x: Tensor) -> Tensor:
    """Return x, which is the sum over ranks if there is only one rank."""
    return x
