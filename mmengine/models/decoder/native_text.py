"""The text decoder on a CPU, with compiled kernels. A single call computes all layers. Values are rounded as
in text.py.

Each matrix is packed while it is read, and only the packed matrix stays in memory.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mmengine.models.decoder.config import DecoderConfig
from mmengine.models.decoder.layers import Makers, gates_behind, is_tied, read_layer, read_norm
from mmengine.models.decoder.lora_parts import decoder_parts
from mmengine.models.decoder.rotary import Rotary
from mmengine.models.decoder.tensors import EMBEDDING, HEAD
from mmengine.models.lora.adapter import AdapterRows
from mmengine.models.lora.tensors import AdapterTensors
from mmengine.models.plugin import AttentionPort, AuxHiddenStates
from mmengine.models.progress import report_step
from mmengine.models.reader import WeightReader
from mmengine.models.states import StepStates
from mmengine.native.decoder import Decoder
from mmengine.native.decoder_weights import LayerWeights, NativeLayer, Sizes
from mmengine.native.delta import STATE_ARRAYS, DeltaSizes, StateStep
from mmengine.native.experts import Experts, PackedExperts
from mmengine.native.feed_forward import Dense, Mixture
from mmengine.native.linear import AnyWeight, ChunkedCodes, ChunkedWeight, Codes, PackedLinear
from mmengine.native.lora import LoraStep, PackedAdapter
from mmengine.native.rotary import RotaryTable

R = TypeVar("R", Tensor, Codes)


class NativeTextDecoder:
    """Has the methods of TextDecoder, and uses the CPU kernels. Steps must not overlap, because they share
    scratch memory. `experts`: the mixture-of-experts blocks, if any.
    `has_vocabulary`: False for a decoder without embedding and LM head, whose `embed` and `logits` must not
    be called.
    """

    batch_invariant = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightReader,
        library: ctypes.CDLL,
        has_vocabulary: bool = True,
    ) -> None:
        self._config = config

        def pack(names: Sequence[str], bias: Tensor | None = None, *, gate_up: bool = False) -> PackedLinear:
            return PackedLinear(library, weights.held(*names, alike=gate_up), bias, gate_up=gate_up)

        def exact(names: Sequence[str], bias: Tensor | None) -> PackedLinear:
            return PackedLinear(library, weights.pieces(*names), bias)

        def gated(names: Sequence[str], bias: Tensor | None) -> PackedLinear:
            bias = None if bias is None else bias[gates_behind(config)]
            return PackedLinear(library, with_gates_behind(weights.held(*names, alike=True), config), bias)

        def experts(groups: Sequence[Sequence[str]], *, gate_up: bool = False) -> PackedExperts:
            return PackedExperts(library, weights.held_each(groups), gate_up=gate_up)

        gate_up, experts_gate_up = partial(pack, gate_up=True), partial(experts, gate_up=True)
        makers = Makers(pack, gate_up, exact, experts_gate_up, experts, gated)
        layers = [
            _in_kernels(library, read_layer(config, weights, i, makers)) for i in range(config.num_layers)
        ]
        self.experts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
        norm, dtype = read_norm(config, weights), weights.dtype
        self._head: PackedLinear | None = None
        self._rows: PackedLinear | None = None
        self._embedding: Tensor | None = None
        if has_vocabulary:
            # With tied weights, embedding rows are unpacked from the packed LM head.
            tied = is_tied(config, weights)
            self._head = pack([EMBEDDING if tied else HEAD])
            # Rows of a quantised embedding are unpacked from the packed matrix too.
            quantised = not tied and weights.keeps_blocks(EMBEDDING)
            self._rows = self._head if tied else pack([EMBEDDING]) if quantised else None
            self._embedding = None if self._rows is not None else weights.read(EMBEDDING)
        sizes = Sizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            rotary_dim=config.rotary_dim,
            gated=config.gated,
            norm_once=config.norm_offset,
            delta=delta_sizes(config),
        )
        self._decoder = Decoder(library, sizes, dtype, layers, norm)
        self._states = None if sizes.delta is None else StateStep(sizes.delta, dtype)
        rotary = Rotary(config.rope, config.rotated, torch.device("cpu"))
        self._rotary = RotaryTable(library, rotary.axis, rotary.halves, dtype)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [t, hidden] for token ids int64 [t]."""
        if self._rows is not None:
            return self._rows.rows(input_ids)
        assert self._embedding is not None
        return F.embedding(input_ids, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [s, vocab], for normed hidden states [s, hidden]."""
        assert self._head is not None
        return self._head(hidden, float32=True)

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
        [3, t]. Fills `aux_hidden_states.rows`, updates `states`, and adds each adapter's products to the rows
        that use the adapter.
        """
        cos, sin = self._rotary.rows(positions)
        report_step()  # Reported only once, because a single call computes all layers.
        aux_rows = None if aux_hidden_states is None else (aux_hidden_states.layers, aux_hidden_states.rows)
        pointed = None
        if self._states is not None and states is not None:
            arrays = {name: getattr(states, name) for name in STATE_ARRAYS}
            tensors = (states.conv, states.recurrent, states.pending)
            pointed = self._states.point(tensors, arrays, states.stayed)
        lora = None
        if adapters:
            own = [(each.adapter.text, each.rows) for each in adapters]
            lora = LoraStep([(made, rows) for made, rows in own if isinstance(made, PackedAdapter)])
        return self._decoder.forward(embeds, deepstack, cos, sin, attention, aux_rows, pointed, lora)

    def adapter(self, tensors: AdapterTensors) -> PackedAdapter:
        """Pack an adapter's matrices for this decoder. The result is stored in LoadedAdapter.text."""
        return PackedAdapter(decoder_parts(self._config, tensors))


def _in_kernels(
    library: ctypes.CDLL,
    layer: LayerWeights[PackedLinear, Dense[PackedLinear] | Mixture[PackedLinear, PackedExperts]],
) -> NativeLayer:
    after = layer.feed_forward
    kept = (layer.input_norm, layer.qkv, layer.qk_norm, layer.out, layer.post_norm)
    return LayerWeights(*kept, after if isinstance(after, Dense) else Experts(library, after), layer.delta)


def delta_sizes(config: DecoderConfig) -> DeltaSizes | None:
    if (d := config.delta) is None:
        return None
    return DeltaSizes(d.num_key_heads, d.num_heads, d.key_dim, d.value_dim, d.taps, d.tiled)


def with_gates_behind(weight: AnyWeight, config: DecoderConfig) -> AnyWeight:
    """Reorder a matrix's rows as `gates_behind` does, chunk by chunk."""
    if isinstance(weight, ChunkedWeight):
        return replace(weight, chunks=_moved(weight.chunks, config))
    if isinstance(weight, ChunkedCodes):
        return replace(weight, chunks=_moved(weight.chunks, config))
    return replace(weight, chunks=_moved(weight.chunks, config))


def _moved(pieces: Iterable[tuple[int, R]], config: DecoderConfig) -> Iterator[tuple[int, R]]:
    heads, size = config.num_heads, config.head_dim
    behind = (heads + 2 * config.num_kv_heads) * size
    for first, rows in pieces:
        count, start = len(rows[0] if isinstance(rows, Codes) else rows), 0
        while start < count:
            head, inside = divmod(first + start, size)
            end, to = count, first + start - heads * size
            if head < 2 * heads:
                end = min(count, start + size - inside)
                to = (behind if head % 2 else 0) + head // 2 * size + inside
            yield to, _cut(rows, start, end)
            start = end


def _cut(rows: R, start: int, end: int) -> R:
    if not isinstance(rows, Codes):
        return rows[start:end]
    values, scales, mins = rows
    return Codes(values[start:end], scales[start:end], None if mins is None else mins[start:end])
