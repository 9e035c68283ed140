"""Computes a draft head on a CPU with native kernels. A single call computes a pass, or all passes that draft
a chain of tokens.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmengine.models.plugin import AttentionPort
from mmengine.native.decoder_weights import DecoderWeights, LayerWeights, NativeLayer, Sizes
from mmengine.native.draft_head import ChainPlaces, HeadParts, NativeHead
from mmengine.native.feed_forward import Dense
from mmengine.native.linear import PackedLinear
from mmengine.native.rotary import RotaryTable
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.drafting.eagle3.head import DraftHead, HeadLayer, HeadWeights
from mmengine.runtime.drafting.head.chain_rows import ChainRows
from mmengine.runtime.drafting.head.linears import Linear
from mmengine.spec_decode.eagle3.config import HeadConfig

# An embedding matrix up to this size is copied for the kernels, and a single call drafts a whole chain. With
# a larger matrix, Python calls the kernels for each pass. These calls take little time compared with the
# passes.
MAX_EMBEDDING_BYTES = 64 * 2**20


class NativeDraftHead(DraftHead):
    """A DraftHead whose passes and chains are computed by native kernels. Not thread-safe."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        placement: Placement,
        library: ctypes.CDLL,
    ) -> None:
        super().__init__(config, weights, placement)
        dtype = self.dtype
        self._table = RotaryTable(library, self._rotary.axis, self._rotary.halves, dtype)
        sizes = Sizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        layers = [_layer(layer) for layer in weights.layers]
        parts = HeadParts(
            embed_size=config.embed_size,
            aux_size=config.target_hidden_size,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            fc=_in_kernels(weights.fc),
            fc_norms=weights.fc_norms,
            embed_norm=layers[0].input_norm,
            hidden_norm=weights.hidden_norm,
            scores=weights.packed_scores,
            embedding=_small_embedding(config, weights, dtype),
            target_ids=weights.target_ids,
        )
        self._native = NativeHead(library, DecoderWeights(sizes, dtype, layers, weights.norm), parts)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self._native.fuse(aux_hidden_states)

    def forward(
        self,
        hidden: Tensor,
        next_embeds: Tensor,
        positions: Tensor,
        attention: AttentionPort,
        first_layer: int,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self._table.rows(positions)
        z, stream = self._native.forward(hidden, next_embeds, cos, sin, attention, first_layer)
        return z, (z if self.config.norm_output else stream)

    def chain(
        self, z: Tensor, carry: Tensor, rows: ChainRows, attention: Any, first_layer: int, block_size: int
    ) -> Tensor:
        if not self._native.can_chain or not hasattr(attention, "layers_address"):
            return super().chain(z, carry, rows, attention, first_layer, block_size)
        tables = self._table.upto(int((rows.positions + rows.most).max()))
        places = ChainPlaces(
            most=_packed(rows.most),
            kv_lens=_packed(rows.kv_lens),
            positions=_packed(rows.positions),
            table=_rows_packed(rows.table),
            block_size=block_size,
        )
        layers = attention.layers_address() + first_layer * ctypes.sizeof(ctypes.c_void_p)
        return self._native.chain(z, carry, places, torch.from_numpy(rows.drafts()), tables, layers)


def _packed(column: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(column, np.int32)


def _rows_packed(table: np.ndarray) -> np.ndarray:
    """Return `table` with contiguous rows."""
    return table if table.dtype == np.int32 and table.strides[1] == 4 else _packed(table)


def _layer(layer: HeadLayer) -> NativeLayer:
    return LayerWeights(
        layer.input_norm,
        _in_kernels(layer.qkv),
        layer.qk_norm,
        _in_kernels(layer.out),
        layer.post_norm,
        Dense(_in_kernels(layer.feed_forward.gate_up), _in_kernels(layer.feed_forward.down)),
    )


def _in_kernels(linear: Linear) -> PackedLinear:
    """Return `linear`, which must be a PackedLinear."""
    assert isinstance(linear, PackedLinear)
    return linear


def _small_embedding(config: HeadConfig, weights: HeadWeights, dtype: torch.dtype) -> Tensor | None:
    if config.vocab_size * config.embed_size * dtype.itemsize > MAX_EMBEDDING_BYTES:
        return None
    return weights.embed(torch.arange(config.vocab_size)).contiguous()
